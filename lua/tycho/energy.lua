--- Energy that a program takes: ty.energy.
--
--     local meter = ty.energy.meter { device = "cuda" }
--     train()
--     print(meter:read())                     -- 1.32 Wh in 61.0 s; the processors (RAPL): 0.41 Wh; ...
--
-- By the counters of the processors (RAPL, where the kernel lets them be read) and of the GPU (NVML); where there are
-- none, as in most virtual machines, by a model of processor seconds and memory, and then it says so.
local ty = require "tycho"
local arguments = require "tycho.arguments"

local M = {}

-- Lannelongue et al. 2021, "Green Algorithms": a core of a processor that is not further known, and a GB of memory.
local core_watts, memory_watts = 12.0, 0.3725

--- What takes energy: made by energy.meter, it counts from then on.
---@class EnergyMeter
---@field device string
local EnergyMeter = {}
EnergyMeter.__index = EnergyMeter
EnergyMeter.__name = "EnergyMeter"

--- Energy since the meter began. tostring() is a line that says where the figures come from.
---@class EnergyReading
---@field joules number
---@field seconds number            by the clock
---@field processor_seconds number  of all threads
---@field measured boolean          whether all of it comes from counters
---@field parts table[]             { name, joules, source = "rapl", "nvml" or "model" } each
local EnergyReading = {}
EnergyReading.__index = EnergyReading
EnergyReading.__name = "EnergyReading"

local function number_in(path)
  local file <close> = io.open(path)
  return file and tonumber(file:read "l")
end

local function line_in(path)
  local file <close> = io.open(path)
  return file and file:read "l"
end

-- The counters below a folder: packages of processors, and memory beside them. A platform's counter (psys) holds the
-- packages once more.
local function domains(root)
  local ok, names = pcall(ty.io.listdir, root)
  local found = {}
  for _, entry in ipairs(ok and names or {}) do
    local path = root .. "/" .. entry
    local name = entry:find "^intel%-rapl:" and line_in(path .. "/name")
    local counted = name and (name:find "^package" or name == "dram")
    local now = counted and number_in(path .. "/energy_uj")
    if now then
      found[#found + 1] = { path = path .. "/energy_uj", last = now,
        range = number_in(path .. "/max_energy_range_uj") or 0, joules = 0.0 }
    end
  end
  return found
end

-- NVML counts all GPUs of the machine, CUDA those that CUDA_VISIBLE_DEVICES leaves.
local function gpu_of(device)
  local index = math.tointeger(tonumber(device:match "^cuda:(%d+)$" or 0))
  local visible, listed = os.getenv "CUDA_VISIBLE_DEVICES", {}
  for number in (visible or ""):gmatch "[^,]+" do listed[#listed + 1] = math.tointeger(tonumber(number)) or -1 end
  if not visible or visible == "" then return index end
  return listed[index + 1] or -1
end

local function resident_gigabytes()
  local file <close> = io.open "/proc/self/status"
  for line in file and file:lines() or function() end do
    local kilobytes = line:match "^VmHWM:%s*(%d+)"
    if kilobytes then return tonumber(kilobytes) / 1e6 end
  end
  return 0.0
end

--- Begins to count. options:
--   device         what computes besides the processors ("cpu": nothing)
--   core_watts     of the model: what a busy core takes (12)
--   memory_watts   of the model: what a GB of memory takes, of the most that the process had (0.3725)
--   gpu_watts      of the model: what the GPU takes where it has no counter (nothing: then that is an error)
--   root           where the kernel shows the counters ("/sys/class/powercap")
---@param options? table
---@return EnergyMeter
function M.meter(options)
  local o = arguments.read("energy.meter", options, { device = "cpu", core_watts = core_watts,
    memory_watts = memory_watts, gpu_watts = arguments.none, root = "/sys/class/powercap" },
    { core_watts = "a finite number >= 0", memory_watts = "a finite number >= 0",
      gpu_watts = "a finite number >= 0" })
  if o.device ~= "cpu" and not o.device:find "^cuda:?%d*$" then
    arguments.fail('energy.meter: device: expected "cpu", "cuda" or "cuda:1", got %s', arguments.describe(o.device))
  end
  local self = setmetatable(o, EnergyMeter)
  self.domains = domains(o.root)
  if o.device ~= "cpu" then
    local why
    self.gpu = gpu_of(o.device)
    if self.gpu >= 0 then self.gpu_began, why = ty.cuda.energy(self.gpu) end
    if not self.gpu_began and not o.gpu_watts then
      arguments.fail("energy.meter: device: %s does not tell its energy (%s); gpu_watts says what to count", o.device,
        why or "CUDA_VISIBLE_DEVICES names it by no number")
    end
  end
  self.began, self.processor_began = ty.system.clock(), os.clock()
  return self
end

--- What was taken since the meter began; it counts on. The counters of processors run over after a while (at 100 W
-- after 40 minutes and more): in longer runs it is read more often than that.
---@return EnergyReading
function EnergyMeter:read()
  arguments.expect("EnergyMeter:read", "self.domains", self.domains, "a table")
  local seconds, processor = ty.system.clock() - self.began, os.clock() - self.processor_began
  local parts = {}
  local function part(name, source, joules)
    parts[#parts + 1] = { name = name, source = source, joules = joules }
  end
  if #self.domains > 0 then
    local sum = 0.0
    for _, domain in ipairs(self.domains) do
      local now = number_in(domain.path) or domain.last
      local step = now - domain.last
      if step < 0 then step = step + domain.range end
      domain.joules, domain.last = domain.joules + 1e-6 * step, now
      sum = sum + domain.joules
    end
    part("the machine's processors", "rapl", sum)
  else
    part("processor seconds", "model", self.core_watts * processor)
    part("memory", "model", self.memory_watts * resident_gigabytes() * seconds)
  end
  if self.gpu_began then part("the GPU", "nvml", ty.cuda.energy(self.gpu) - self.gpu_began)
  elseif self.gpu then part("the GPU", "model", self.gpu_watts * seconds) end
  local reading = { seconds = seconds, processor_seconds = processor, parts = parts, joules = 0.0, measured = true }
  for _, one in ipairs(parts) do
    reading.joules = reading.joules + one.joules
    reading.measured = reading.measured and one.source ~= "model"
  end
  return setmetatable(reading, EnergyReading)
end

local function text_of(joules)
  if joules >= 3.6e6 then return ("%.2f kWh"):format(joules / 3.6e6) end
  if joules >= 3600 then return ("%.2f Wh"):format(joules / 3600) end
  return ("%.3g J"):format(joules)
end

local sources = { rapl = "measured, RAPL", nvml = "measured, NVML", model = "a model, not measured" }

function EnergyReading:__tostring()
  local texts = {}
  for i, one in ipairs(self.parts) do
    texts[i] = ("%s %s (%s)"):format(one.name, text_of(one.joules), sources[one.source])
  end
  return ("%s in %.1f s: %s"):format(text_of(self.joules), self.seconds, table.concat(texts, ", "))
end

return M
