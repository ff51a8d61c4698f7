--- What a scheduler_config.json of diffusers says: the process that a network was trained for, and how one samples. A
-- scheduler there is process, solver and spacing in one; here these are three values. Where its classes differ in how
-- they round times or scale the first noise, this does as they do, so that the same noise gives the same picture.
local arguments = require "tycho.arguments"
local process = require "tycho.diffusion.process"
local solvers = require "tycho.diffusion.solver"
local spacings = require "tycho.diffusion.spacing"

local WHO = "diffusion.published"
local fail = arguments.fail

local predictions = { epsilon = "epsilon", v_prediction = "v", sample = "sample" }
local betas = { linear = "linear", scaled_linear = "scaled_linear", squaredcos_cap_v2 = "cosine" }

-- By class: the solver, and the timestep_spacing where the config has none. whole: times are whole numbers; ahead: the
-- spacing is that of one step more without its last time; sigma: noise begins as sigma times standard noise, where
-- others begin with standard noise itself.
local discrete = {
  DDPMScheduler = { solver = solvers.ddpm, spacing = "leading", whole = true },
  DDIMScheduler = { solver = solvers.ddim, spacing = "leading", whole = true },
  EulerDiscreteScheduler = { solver = solvers.euler, spacing = "linspace", sigma = true },
  HeunDiscreteScheduler = { solver = solvers.heun, spacing = "linspace", sigma = true },
  DPMSolverMultistepScheduler = { solver = solvers.dpmpp_2m, spacing = "linspace", whole = true, ahead = true },
}
local flows = {
  FlowMatchEulerDiscreteScheduler = solvers.euler,
  FlowMatchHeunDiscreteScheduler = solvers.heun,
}

local function one_of(key, value, known)
  if known[value] then return known[value] end
  local names = {}
  for name in pairs(known) do names[#names + 1] = name end
  table.sort(names)
  return fail("%s: %s: expected %s, got %s", WHO, key, table.concat(names, " or "), tostring(value))
end

-- A key's value, or what stands for it where the config has none.
local function value_of(config, key, default)
  local value = config[key]
  if value == nil then return default end
  arguments.expect(WHO, key, value, type(default) == "number" and "a finite number" or "a " .. type(default))
  return value
end

local function refuse(config, keys)
  for _, key in ipairs(keys) do
    if config[key] then fail("%s: %s: expected false, got %s", WHO, key, tostring(config[key])) end
  end
end

local function rounded(t) return math.floor(t + 0.5) end

-- The spacings of a class that leaves the last of steps + 1 times out.
local function ahead(name, offset)
  return function(schedule, steps)
    local times, ratio = {}, schedule.steps // (steps + 1)
    for i = 0, steps - 1 do
      times[i + 1] = name == "leading" and (steps - i) * ratio + offset
        or rounded((schedule.steps - 1) * (steps - i) / steps)
    end
    return spacings.times(times)(schedule)
  end
end

-- Karras's points, at times that the network is told as whole ones.
local function karras(whole)
  local plain = spacings.karras()
  return function(schedule, steps)
    local points = plain(schedule, steps)
    for _, point in ipairs(points) do
      if whole and point.sigma > 0 then point.time = rounded(point.time) end
    end
    return points
  end
end

local function spacing_of(config, known)
  if value_of(config, "use_karras_sigmas", false) then return karras(known.whole) end
  local final = value_of(config, "set_alpha_to_one", true) and "clean" or "first"
  local offset = value_of(config, "steps_offset", 0)
  local made = {
    leading = function() return spacings.leading { offset = offset, final = final } end,
    trailing = function() return spacings.trailing { final = final } end,
    linspace = function() return spacings.linspace { final = final, rounded = known.whole or false } end,
  }
  local name = value_of(config, "timestep_spacing", known.spacing)
  local make = one_of("timestep_spacing", name, made)
  return known.ahead and name ~= "trailing" and ahead(name, offset) or make()
end

--- The process of a scheduler's config, with its solver and spacing as what it samples with; and whether sampling
-- begins with sigma times standard noise. Raises for a class or a value that is not known.
---@param config table  with _class_name
---@return Process
---@return boolean scaled
return function(config)
  arguments.expect(WHO, "config", config, "a table")
  local name = arguments.expect(WHO, "config._class_name", config._class_name, "a string")
  if flows[name] then
    refuse(config, { "use_dynamic_shifting", "use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas" })
    local shift = value_of(config, "shift", 1.0)
    local made = process.Flow { shift = shift }
    -- diffusers shifts the least time once for its table, and once more with all others.
    made.defaults = { solver = flows[name](), steps = 20,
      spacing = spacings.linspace { last = made.schedule:from_unit(0.001) } }
    return made, false
  end
  local known = discrete[name]
  if not known then
    local names = {}
    for class in pairs(discrete) do names[#names + 1] = class end
    for class in pairs(flows) do names[#names + 1] = class end
    table.sort(names)
    fail("%s: config._class_name: expected one of %s, got %s", WHO, table.concat(names, ", "), name)
  end
  refuse(config, { "use_exponential_sigmas", "use_beta_sigmas", "use_lu_lambdas", "thresholding" })
  local clips = value_of(config, "clip_sample", name:find "^DD" ~= nil)
  local made = process.DDPM { steps = value_of(config, "num_train_timesteps", 1000),
    betas = config.trained_betas or one_of("beta_schedule", value_of(config, "beta_schedule", "linear"), betas),
    beta_start = value_of(config, "beta_start", 1e-4), beta_end = value_of(config, "beta_end", 0.02),
    zero_snr = value_of(config, "rescale_betas_zero_snr", false),
    predict = one_of("prediction_type", value_of(config, "prediction_type", "epsilon"), predictions),
    clip = clips and value_of(config, "clip_sample_range", 1.0) or false }
  made.defaults = { solver = known.solver(), spacing = spacing_of(config, known), clip = made.defaults.clip,
    steps = math.min(20, made.schedule.steps) }
  return made, known.sigma and value_of(config, "timestep_spacing", known.spacing) ~= "leading" or false
end
