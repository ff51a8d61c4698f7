--- What a model is made of, seen in one forward pass: shapes, parameters and work by module.
local arguments = require "tycho.arguments"
local take = require "tycho.profile.take"

--- A module's parts with shapes, parameters and work, of model:summary. tostring() gives the table.
---@class Summary
---@field rows table[]  name, class, depth, shape (of the first output), parameters, flops, numbers (of the outputs)
local Summary = {}
Summary.__index = Summary
Summary.__name = "Summary"

local function thousands(n)
  local text = ("%d"):format(n):reverse():gsub("(%d%d%d)", "%1,"):reverse()
  return (text:gsub("^,", ""))
end

local function work(flops)
  if flops >= 1e9 then return ("%.2f G"):format(flops / 1e9) end
  if flops >= 1e6 then return ("%.2f M"):format(flops / 1e6) end
  return thousands(flops // 1)
end

local right_of = { false, false, true, true } -- numbers stand at the right of their columns

function Summary:__tostring()
  local lines = { { "module", "output", "parameters", "FLOPs" } }
  for _, row in ipairs(self.rows) do
    local label = row.depth == 0 and row.class or row.name:match "[^.]*$" .. ": " .. row.class
    lines[#lines + 1] = { ("  "):rep(row.depth) .. label,
      row.shape and "[" .. table.concat(row.shape, ", ") .. "]" or "",
      row.parameters > 0 and thousands(row.parameters) or "", row.flops > 0 and work(row.flops) or "" }
  end
  local widths, out = { 0, 0, 0, 0 }, {}
  for _, line in ipairs(lines) do
    for c, text in ipairs(line) do widths[c] = math.max(widths[c], #text) end
  end
  for i, line in ipairs(lines) do
    local cells = {}
    for c, text in ipairs(line) do
      local gap = (" "):rep(widths[c] - #text)
      cells[c] = right_of[c] and gap .. text or text .. gap
    end
    out[#out + 1] = table.concat(cells, "  "):gsub("%s+$", "")
    if i == 1 then out[#out + 1] = ("-"):rep(#table.concat(cells, "  ")) end
  end
  local whole = self.rows[1]
  out[#out + 1] = ("%s parameters, %s FLOPs forward, outputs of modules %.2f MB"):format(thousands(whole.parameters),
    work(whole.flops), self.activations / 1e6)
  return table.concat(out, "\n")
end

-- The model's inputs from what summary() was given: a shape, a tensor, or a list of these.
local function inputs_of(who, given, device)
  local ty = require "tycho"
  local function input(value)
    if ty.is_tensor(value) then return value:to { device = device } end
    return ty.zeros(arguments.expect(who, "inputs", value, "a list of integers"), { device = device })
  end
  if ty.is_tensor(given) or type(given) ~= "table" or math.type(given[1]) == "integer" then return { input(given) } end
  if #given == 0 then arguments.fail("%s: inputs: expected at least one, got none", who) end
  local list = {}
  for i, value in ipairs(given) do list[i] = input(value) end
  return list
end

--- Runs a model once, without gradients and in evaluation mode, and tells by module the shape of the output, the
-- parameters and the floating-point operations of it and all below it. inputs: the shape of the only input, { 8, 3, 64,
-- 64 } (zeros, f32), or a tensor, or a list of shapes and tensors. options: depth (3: levels of modules), more (a table
-- that forward() gets behind the inputs).
---@param model Module
---@param inputs integer[]|Tensor|table
---@param options? { depth?: integer, more?: table }
---@return Summary
return function(model, inputs, options)
  local who = "Module:summary"
  arguments.expect(who, "model", model, "a module")
  local o = arguments.read(who, options, { depth = 3, more = arguments.none },
    { depth = "an integer >= 0", more = "a table" })
  local list = inputs_of(who, inputs, model:device())
  if o.more then list[#list + 1] = o.more end
  local ty, training = require "tycho", model.training
  model:eval()
  local ok, run = pcall(take, function()
    ty.no_grad(function() return model(table.unpack(list)) end)
  end, { model = model, most = 10000000 })
  model:train(training)
  if not ok then error(run, 0) end
  local whole = getmetatable(model).__name
  local flops, shapes, self = {}, {}, setmetatable({ rows = {}, activations = 0 }, Summary)
  for _, event in ipairs(run.events) do
    local name = event.module or whole
    repeat -- the work of a module is that of all around it, too
      flops[name] = (flops[name] or 0) + event.flops
      local outer = name:match "^(.*)%.[^.]*$" or name ~= whole and whole or nil
      name = outer
    until not name
  end
  for _, call in ipairs(run.scopes) do
    local y = call.outputs[1]
    if ty.is_tensor(y) then
      shapes[call.name] = shapes[call.name] or y.shape
      self.activations = self.activations + y:nbytes()
    end
  end
  for name, module in model:named_modules() do
    local _, points = name:gsub("%.", "")
    local depth = name == "" and 0 or points + 1
    local key = name == "" and whole or name
    if depth <= o.depth then
      self.rows[#self.rows + 1] = { name = name, class = getmetatable(module).__name, depth = depth,
        shape = shapes[key], parameters = module:count_parameters(), flops = flops[key] or 0 }
    end
  end
  return self
end
