--- Running a function under the native profile, with the modules of a model as scopes.
local core = require "tycho.core"

local shared = require "tycho.profile.shared"

local native, clock = core.profile_core, core.system.clock

local numbered = 0 -- scopes of all profiles so far: a node of an older one must not be taken for one of this

-- Gives the modules below `model` hooks that number their scopes. Returns the names by number, the calls, and a
-- function that takes the hooks away.
local function watch(model)
  local names, calls, undo, seen, open = {}, {}, {}, {}, {}
  for name, module in model:named_modules() do
    if not seen[module] then -- one that is shared has the first of its names
      seen[module] = true
      numbered = numbered + 1
      local number = numbered
      names[number] = name == "" and getmetatable(model).__name or name
      undo[#undo + 1] = module:register_forward_pre_hook(function()
        open[#open + 1] = { before = native.scope(number), name = names[number], begin = clock() }
      end)
      undo[#undo + 1] = module:register_forward_hook(function(_, outputs)
        local call = table.remove(open)
        native.scope(call.before)
        call.seconds, call.outputs = clock() - call.begin, outputs
        calls[#calls + 1] = call
      end)
    end
  end
  return names, calls, function() for _, fn in ipairs(undo) do fn() end end
end

--- Runs fn(). options: model, most (events), find (nil; "nan" or "infinite": the first event whose output is such has
-- `bad`). Returns { events, scopes, seconds, lost } and what fn returned; an error of fn passes as it is.
---@param fn function
---@param options { model?: Module, most: integer, find?: string }
---@return table run
---@return table results  as of table.pack()
return function(fn, options)
  if shared.give_way then shared.give_way() end
  native.start(options.most, ({ nan = 1, infinite = 2 })[options.find] or 0)
  local names, calls, unwatch = {}, {}, function() end
  if options.model then names, calls, unwatch = watch(options.model) end
  local begin = clock()
  local results = table.pack(pcall(fn))
  local seconds = clock() - begin
  local events, lost = native.stop()
  unwatch()
  if not results[1] then error(results[2], 0) end
  for _, event in ipairs(events) do
    event.begin, event.module = event.begin - begin, names[event.scope]
    event.scope = nil
  end
  for _, call in ipairs(calls) do call.begin, call.before = call.begin - begin, nil end
  return { events = events, scopes = calls, seconds = seconds, lost = lost },
    table.pack(table.unpack(results, 2, results.n))
end
