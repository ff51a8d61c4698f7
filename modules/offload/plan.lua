-- What training takes, by kind, and where it can be: known before the first step.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local units_of = require "tycho.nn.units"

local fail, tier = arguments.fail, ty.core.tier_core
local scale = { [""] = 1, B = 1, KB = 1e3, MB = 1e6, GB = 1e9, TB = 1e12, KIB = 1 << 10, MIB = 1 << 20, GIB = 1 << 30,
  TIB = 1 << 40 }

-- "2 GiB", "500 MB" or a number of bytes.
local function bytes_of(name, value)
  if value == nil then return nil end
  local number, unit
  if type(value) == "number" then number, unit = value, ""
  elseif type(value) == "string" then number, unit = value:match "^%s*([%d.]+)%s*(%a*)%s*$" end
  number, unit = tonumber(number), unit and scale[unit:upper()]
  if not number or not unit or not (number >= 0 and number < math.huge) then
    fail('offload.plan: %s: expected bytes such as "2 GiB" or "500 MB", got %s', name, arguments.describe(value))
  end
  return math.floor(number * unit)
end

local function text(bytes)
  for _, row in ipairs { { "GiB", 1 << 30 }, { "MiB", 1 << 20 }, { "KiB", 1 << 10 } } do
    if bytes >= row[2] then return ("%.2f %s"):format(bytes / row[2], row[1]) end
  end
  return ("%d B"):format(bytes)
end

-- What the folder of the file is on: refused where a file cannot be.
local function disk_of(folder)
  local ok, file = pcall(tier.open, folder, "threads", true)
  if not ok then fail("offload.plan: file: %s", (tostring(file):gsub("^.-tier: ", ""))) end
  local stats = file:stats()
  file:close()
  return stats
end

-- From what is best kept on the device to what is sent away first: what each byte costs to be moved in a step.
local order = { "activations", "parameters", "gradients", "moments" }

-- Bytes by kind in all, and what of a kind is on the device at a time while it lives elsewhere.
local function account(model, o)
  local all, working = { activations = o.activations, parameters = 0, gradients = 0, moments = 0 }, {}
  local largest, most = 0, 0
  for _, unit in ipairs(units_of(model)) do
    local held, elements = 0, 0
    for _, p in ipairs(unit.params) do
      held = held + p:nbytes()
      if p.requires_grad then
        all.gradients = all.gradients + p:nbytes()
        elements = elements + p:numel()
      end
    end
    all.parameters = all.parameters + held
    all.moments = all.moments + o.moments * elements
    largest, most = math.max(largest, held), math.max(most, o.moments * elements)
  end
  working.parameters = math.min(all.parameters, o.window * largest)
  working.gradients = math.min(all.gradients, largest)
  working.moments = math.min(all.moments, o.window * most)
  working.activations = math.min(all.activations, 2 * all.activations // math.max(1, o.depth) + o.in_flight)
  return all, working
end

--- Where the parameters, gradients, moments and activations of a model are to be, so that training fits: as much as
-- goes on the device, then in the host's memory, then in the file. Prints it by kind, and refuses what cannot fit,
-- saying by how much. options:
--   device        bytes, or "2 GiB": what training may take of the device's memory
--   host          likewise beside it (none)
--   file          folder of a file (none)
--   moments       bytes of the optimizer's state for each element (8: those of Adam in f32)
--   activations   bytes that the backward pass wants kept (0: not counted)
--   window        units on the device at a time while parameters live elsewhere (2)
--   in_flight     bytes of writes under way (64 MiB)
--   quiet         true: prints nothing
---@param model Module
---@param options table
---@return table plan  for offload.engine; its `budget` has the bytes by place and kind
return function(model, options)
  arguments.expect("offload.plan", "model", model, "a module")
  local o = arguments.read("offload.plan", options, { device = arguments.none, host = 0, file = arguments.none,
    moments = 8, activations = 0, window = 2, in_flight = 64 << 20, quiet = false },
    { device = "a string or a number >= 0", host = "a string or a number >= 0", file = "a string",
      moments = "a number >= 0", activations = "a string or a number >= 0", window = "an integer >= 1",
      in_flight = "an integer >= 0", quiet = "a boolean" })
  local room = { device = bytes_of("device", o.device), host = bytes_of("host", o.host) }
  if not room.device then fail "offload.plan: device: expected bytes such as \"2 GiB\", got nil" end
  if o.file and not ty.io.exists(o.file) then fail("offload.plan: file: there is no folder %s", o.file) end
  local disk = o.file and disk_of(o.file)
  o.activations, o.depth = bytes_of("activations", o.activations), #units_of(model)
  o.in_flight = math.min(o.in_flight, room.device // 8)
  local all, working = account(model, o)

  local place, used = {}, { device = 0, host = 0, file = 0 }
  for _, kind in ipairs(order) do
    place[kind] = "device"
    used.device = used.device + all[kind]
  end
  for i = #order, 1, -1 do
    local kind = order[i]
    if used.device <= room.device then break end
    if working[kind] < all[kind] then
      local to = used.host + all[kind] <= room.host and "host" or o.file and "file"
      if to then
        place[kind] = to
        used[to] = used[to] + all[kind]
        used.device = used.device - all[kind] + working[kind]
      end
    end
  end

  local plan = { file = o.file, host = room.host > 0 and room.host or nil, in_flight = o.in_flight,
    budget = { device = {}, host = {}, file = {} } }
  local lines = {}
  for _, kind in ipairs(order) do
    plan[kind] = place[kind]
    plan.budget.device[kind] = place[kind] == "device" and all[kind] or working[kind]
    if place[kind] ~= "device" then plan.budget[place[kind]][kind] = all[kind] end
    lines[#lines + 1] = ("  %-12s %12s   on the %-6s %12s at a time"):format(kind, text(all[kind]), place[kind],
      text(plan.budget.device[kind]))
  end
  lines[#lines + 1] = ("  %-12s %12s   of %s"):format("device", text(used.device), text(room.device))
  if disk then
    lines[#lines + 1] = ("  %-12s %12s   of %s, %s"):format("file", text(used.file),
      disk.room >= 0 and text(disk.room) .. " free" or "what nobody says",
      disk.memory and o.file .. " is memory, no disk" or (disk.direct and "past" or "through") .. " the page cache")
  end
  local report = table.concat(lines, "\n")
  if disk and disk.room >= 0 and used.file > disk.room then
    fail("offload.plan: %s more are needed on the disk of %s\n%s", text(used.file - disk.room), o.file, report)
  end
  if used.device > room.device then
    fail("offload.plan: %s more are needed on the device%s\n%s", text(used.device - room.device),
      o.file and "" or ", or a file", report)
  end
  if not o.quiet then print(report) end
  return plan
end
