--- What a scheduler_config.json of diffusers says: the process that a network was trained for, and how one samples. A
-- scheduler there is process, solver and spacing in one; here these are three values. Where its classes differ in how
-- they round times or scale the first noise, this does as they do, so that the same noise gives the same picture. Two
-- things are as they should be instead: a step always ends at the time where the next one begins (with DDIM, DDPM and
-- PNDM there, only where the spacing is "leading" or divides the table), and the third order of the SDE's solver.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local points = require "tycho.diffusion.published.points"
local process = require "tycho.diffusion.process"
local solvers = require "tycho.diffusion.solver"

local WHO = "diffusion.published"
local fail = arguments.fail

local predictions = { epsilon = "epsilon", v_prediction = "v", sample = "sample" }
local betas = { linear = "linear", scaled_linear = "scaled_linear", squaredcos_cap_v2 = "cosine" }
local LEAST = 2 ^ -24 -- of the signal, for classes that divide by it

-- ---- reading ----

-- Every key of these classes. A class ignores those of others, as it does there: configs are passed from one to
-- another.
local known_keys = {}
for key in ([[num_train_timesteps beta_start beta_end beta_schedule trained_betas prediction_type variance_type
  clip_sample clip_sample_range set_alpha_to_one steps_offset timestep_spacing rescale_betas_zero_snr thresholding
  dynamic_thresholding_ratio sample_max_value skip_prk_steps original_inference_steps timestep_scaling
  interpolation_type timestep_type use_karras_sigmas use_exponential_sigmas use_beta_sigmas use_lu_lambdas
  use_flow_sigmas flow_shift sigma_min sigma_max final_sigmas_type solver_order solver_type algorithm_type
  lower_order_final euler_at_final lambda_min_clipped predict_x0 disable_corrector solver_p use_dynamic_shifting
  time_shift_type shift_terminal base_shift max_shift base_image_seq_len max_image_seq_len shift invert_sigmas
  stochastic_sampling sigma_data sigma_schedule rho]]):gmatch "%S+" do known_keys[key] = true end

local function read_config(config)
  local read = {}
  for key, value in pairs(config) do
    if type(key) ~= "string" or key:sub(1, 1) ~= "_" and not known_keys[key] then
      fail("%s: config: no key '%s' is known", WHO, tostring(key))
    end
    if value ~= ty.io.null then read[key] = value end
  end
  return read
end

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

local function optional_number(config, key)
  local value = config[key]
  if value ~= nil then arguments.expect(WHO, key, value, "a finite number") end
  return value
end

local function refuse(config, keys)
  for _, key in ipairs(keys) do
    if config[key] then fail("%s: %s: expected false, got %s", WHO, key, tostring(config[key])) end
  end
end

local finals = { zero = "clean", sigma_min = "first" }
local function final_of(config) return one_of("final_sigmas_type", config.final_sigmas_type or "zero", finals) end

local function curve_of(config)
  local found
  for key, name in pairs { use_karras_sigmas = "karras", use_exponential_sigmas = "exponential",
    use_beta_sigmas = "beta", use_lu_lambdas = "lu" } do
    if value_of(config, key, false) then
      if found then fail("%s: %s: expected false beside %s sigmas, got true", WHO, key, found) end
      found = name
    end
  end
  return found
end

-- The clean sample's largest values are brought to 1, by a quantile of each sample. Saharia et al. 2022 (Imagen),
-- section 2.3.
local function threshold(ratio, most)
  return function(x0)
    local shape = { x0.shape[1] }
    for i = 2, x0.ndim do shape[i] = 1 end
    local bound = x0:abs():flatten(1):quantile(ratio, 1):clamp(1, most):reshape(shape)
    return ty.minimum(ty.maximum(x0, -bound), bound) / bound
  end
end

-- What is done to the clean sample: false, a number or a function, as the sampler's option `clip`. thresholds: whether
-- the class can; cuts: whether it cuts where the config does not say, nil where it never does.
local function clip_of(config, thresholds, cuts)
  if thresholds and value_of(config, "thresholding", false) then
    return threshold(value_of(config, "dynamic_thresholding_ratio", 0.995), value_of(config, "sample_max_value", 1.0))
  end
  return cuts ~= nil and value_of(config, "clip_sample", cuts) and value_of(config, "clip_sample_range", 1.0) or false
end

-- ---- solvers ----

local function ddpm(config)
  local kind = config.variance_type or "fixed_small"
  return solvers.ddpm { variance = one_of("variance_type", kind, { fixed_small = "small", fixed_small_log = "small",
    fixed_large = "large" }) }
end

local rules = { midpoint = "midpoint", heun = "heun", logrho = "midpoint", bh1 = "midpoint", bh2 = "midpoint" }
local algorithms = {
  ["dpmsolver++"] = { of = "sample", sde = false }, dpmsolver = { of = "epsilon", sde = false },
  ["sde-dpmsolver++"] = { of = "sample", sde = true }, ["sde-dpmsolver"] = { of = "epsilon", sde = true },
  deis = { of = "sample", sde = false },
}

local function dpm(config)
  local algorithm = one_of("algorithm_type", config.algorithm_type or "dpmsolver++", algorithms)
  return solvers.dpm { order = value_of(config, "solver_order", 2), of = algorithm.of, sde = algorithm.sde,
    third = "half",
    rule = one_of("solver_type", config.solver_type or "midpoint", rules),
    lower_final = value_of(config, "lower_order_final", true), euler_final = value_of(config, "euler_at_final", false) }
end

-- Where it ends in the clean sample, or the steps are no whole groups, its last steps are of lower order in any case.
local function dpm_single(config)
  local algorithm = one_of("algorithm_type", config.algorithm_type or "dpmsolver++", { dpmsolver = "epsilon",
    ["dpmsolver++"] = "sample", deis = "sample" })
  return solvers.dpm_single { order = value_of(config, "solver_order", 2), of = algorithm,
    rule = one_of("solver_type", config.solver_type or "midpoint", rules) }
end

local weights = { bh1 = "bh1", bh2 = "bh2", midpoint = "bh2", heun = "bh2", logrho = "bh2" }

local function unipc(config)
  refuse(config, { "solver_p" })
  local uncorrected = {}
  for i, step in ipairs(value_of(config, "disable_corrector", {})) do uncorrected[i] = step + 1 end
  return solvers.unipc { order = value_of(config, "solver_order", 2),
    of = value_of(config, "predict_x0", true) and "sample" or "epsilon",
    weight = one_of("solver_type", config.solver_type or "bh2", weights),
    lower_final = value_of(config, "lower_order_final", true), uncorrected = uncorrected }
end

local function deis(config)
  return solvers.deis { order = value_of(config, "solver_order", 2),
    lower_final = value_of(config, "lower_order_final", true) }
end

local function lcm(config) return solvers.lcm { scaling = value_of(config, "timestep_scaling", 10.0) } end
local function plain_ddim() return solvers.ddim { clipped_noise = false } end
local function plain(make) return function() return make() end end
local function ancestral() return solvers.ddim { eta = 1 } end
local function pndm(config)
  return solvers.pndm { runge_kutta = not value_of(config, "skip_prk_steps", false), mean = "output" }
end

-- ---- classes ----

-- By class: solver; spacing, beta_start, beta_end, betas: where the config has none; clip (whether the clean sample is
-- cut where the config does not say), last (set_alpha_to_one's default; nil: as final_sigmas_type says); fine: times
-- need not be whole; ahead: the spacing is that of one step more without its last time; sigma: noise begins as sigma
-- times standard noise, where others begin with standard noise itself; cut_karras: times of that curve are rounded;
-- curves: whether it has any; only_spacing: the one it has; floor: there is some signal everywhere.
local discrete = {
  DDPMScheduler = { solver = ddpm, spacing = "leading", clip = true, last = true },
  DDIMScheduler = { solver = plain_ddim, spacing = "leading", clip = true, last = true },
  PNDMScheduler = { solver = pndm, spacing = "leading", last = false },
  LCMScheduler = { solver = lcm, spacing = "leading", last = true, beta_start = 0.00085, beta_end = 0.012,
    betas = "scaled_linear", distilled = true, clip = false },
  EulerDiscreteScheduler = { solver = plain(solvers.euler), fine = true, sigma = true, floor = true, curves = true },
  EulerAncestralDiscreteScheduler = { solver = ancestral, fine = true, sigma = true, floor = true, last = true },
  HeunDiscreteScheduler = { solver = plain(solvers.heun), fine = true, sigma = true, beta_start = 0.00085,
    beta_end = 0.012, curves = true, last = true, clip = false },
  KDPM2DiscreteScheduler = { solver = plain(solvers.dpm2), fine = true, sigma = true, beta_start = 0.00085,
    beta_end = 0.012, curves = true, last = true, cut_karras = true },
  LMSDiscreteScheduler = { solver = plain(solvers.lms), fine = true, sigma = true, curves = true, last = true },
  DPMSolverMultistepScheduler = { solver = dpm, ahead = true, floor = true, curves = true },
  DPMSolverSinglestepScheduler = { solver = dpm_single, ahead = true, curves = true, only_spacing = "linspace" },
  UniPCMultistepScheduler = { solver = unipc, ahead = true, floor = true, curves = true },
  DEISMultistepScheduler = { solver = deis, ahead = true, curves = true, last = false },
}
local flows = {
  FlowMatchEulerDiscreteScheduler = function(config)
    return value_of(config, "stochastic_sampling", false) and solvers.lcm { scaling = false } or solvers.euler()
  end,
  FlowMatchHeunDiscreteScheduler = function() return solvers.heun() end,
}
local exploding = {
  EDMEulerScheduler = function() return solvers.euler() end,
  EDMDPMSolverMultistepScheduler = dpm,
}

-- What a network is told of a time, in the numbers of its own table.
local function tell(schedule, scale)
  schedule.network_time = function(_, t) return (ty.is_tensor(t) and t:to "f32" or t) * scale end
end

local function finish(made, defaults)
  made.defaults = defaults
  return made
end

local shifts = { exponential = math.exp, linear = function(mu) return mu end }

-- The shift of a flow: a number of the config, or one that grows with the tokens of a picture.
local function shift_of(config, key, o)
  if not value_of(config, "use_dynamic_shifting", false) then return value_of(config, key, 1.0) end
  local few, many = value_of(config, "base_image_seq_len", 256), value_of(config, "max_image_seq_len", 4096)
  local low, high = value_of(config, "base_shift", 0.5), value_of(config, "max_shift", 1.15)
  local mu = o.mu or low + ((o.tokens or few) - few) * (high - low) / (many - few)
  return one_of("time_shift_type", config.time_shift_type or "exponential", shifts)(mu)
end

local function straight(config, name, o)
  refuse(config, { "invert_sigmas" })
  local heun = name == "FlowMatchHeunDiscreteScheduler"
  local count = value_of(config, "num_train_timesteps", 1000)
  local made = process.Flow { shift = heun and value_of(config, "shift", 1.0) or shift_of(config, "shift", o) }
  tell(made.schedule, count)
  return finish(made, { solver = flows[name](config), steps = 20, spacing = points.flow { count = count, kind = "ends",
    twice = heun or not config.use_dynamic_shifting, terminal = not heun and optional_number(config, "shift_terminal")
    or nil, curve = not heun and curve_of(config) or nil } })
end

-- A solver of tables on a straight path: use_flow_sigmas.
local function straight_multistep(config, name, known, o)
  if config.prediction_type == "v_prediction" then
    fail("%s: prediction_type: expected flow_prediction or epsilon or sample beside use_flow_sigmas, got v_prediction",
      WHO)
  end
  local count, unified = value_of(config, "num_train_timesteps", 1000), name == "UniPCMultistepScheduler"
  local made = process.Flow { shift = shift_of(config, "flow_shift", o) }
  made.objective.predict = one_of("prediction_type", config.prediction_type or "epsilon",
    { epsilon = "epsilon", sample = "sample", flow_prediction = "flow" })
  tell(made.schedule, count)
  local curve = curve_of(config)
  if curve then fail("%s: use_flow_sigmas: expected false beside %s sigmas, got true", WHO, curve) end
  return finish(made, { solver = known.solver(config), steps = 20, clip = clip_of(config, true),
    spacing = points.flow { count = count, kind = unified and "ahead" or "noise", cut = true,
      terminal = unified and optional_number(config, "shift_terminal") or nil,
      final = (known.last == false or final_of(config) == "first") and "last" or "clean" } })
end

-- Karras et al. 2022, as diffusers scales the first noise.
local function edm(config, name)
  local curve = one_of("sigma_schedule", config.sigma_schedule or "karras", { karras = "karras",
    exponential = "exponential" })
  local rho = value_of(config, "rho", 7.0)
  local made = process.EDM { sigma_min = value_of(config, "sigma_min", 0.002),
    sigma_max = value_of(config, "sigma_max", 80.0), rho = rho, data = value_of(config, "sigma_data", 0.5) }
  made.schedule.noise_scale = function(schedule) return math.sqrt(schedule.sigma_max ^ 2 + 1) end
  local parts
  -- The same preconditioning with the other sign: what the network says is turned around.
  if one_of("prediction_type", config.prediction_type or "epsilon", predictions) == "v" then
    parts = { { call = function(_, _, next, request) return -next(request) end } }
  elseif config.prediction_type == "sample" then
    fail("%s: prediction_type: expected epsilon or v_prediction, got sample", WHO)
  end
  return finish(made, { solver = exploding[name](config), steps = 18, parts = parts, clip = clip_of(config, true),
    spacing = points.exploding { curve = curve, rho = rho, final = final_of(config) } })
end

local function table_of_betas(config, name, known)
  local count, spacing = value_of(config, "num_train_timesteps", 1000),
    known.only_spacing or value_of(config, "timestep_spacing", known.spacing or "linspace")
  one_of("timestep_spacing", spacing, { leading = true, linspace = true, trailing = true })
  local clips = clip_of(config, not known.fine and name ~= "PNDMScheduler", known.clip)
  local zero = not known.only_spacing and value_of(config, "rescale_betas_zero_snr", false)
  local kinds = name == "EulerDiscreteScheduler" and { epsilon = "epsilon", v_prediction = "v", sample = "sample",
    original_sample = "sample" } or predictions
  local made = process.DDPM { steps = count, clip = clips, zero_snr = zero, least = zero and known.floor and LEAST or 0,
    betas = config.trained_betas or one_of("beta_schedule", value_of(config, "beta_schedule", known.betas or "linear"),
      betas), beta_start = value_of(config, "beta_start", known.beta_start or 1e-4),
    beta_end = value_of(config, "beta_end", known.beta_end or 0.02),
    predict = one_of("prediction_type", value_of(config, "prediction_type", "epsilon"), kinds) }
  tell(made.schedule, 1)
  if config.interpolation_type and config.interpolation_type ~= "linear" then
    fail("%s: interpolation_type: expected linear, got %s", WHO, tostring(config.interpolation_type))
  end
  local final
  if known.last == nil then
    final = final_of(config)
  elseif known.fine or name == "DDPMScheduler" or name == "DEISMultistepScheduler" then
    final = known.last and "clean" or "first"
  else
    final = value_of(config, "set_alpha_to_one", known.last) and "clean" or "first"
  end
  local curve, cut = known.curves and curve_of(config), nil
  if known.ahead then
    -- There times are whole numbers; which curves round and which cut off differs by class.
    local rounds = curve == "karras" and (name ~= "DPMSolverMultistepScheduler" or config.beta_schedule ~=
      "squaredcos_cap_v2") or curve == "lu"
    cut = rounds and "round" or "floor"
  elseif known.cut_karras and curve == "karras" then
    cut = "round"
  end
  local least = name:find "^DPMSolver" and config.lambda_min_clipped
  made.defaults = { solver = known.solver(config), clip = clips, steps = math.min(20, count),
    spacing = points.discrete { spacing = spacing, offset = value_of(config, "steps_offset", 0), fine = known.fine,
      ahead = known.ahead, original = known.distilled and value_of(config, "original_inference_steps", 50),
      least = type(least) == "number" and least > -math.huge and least or nil, curve = curve or nil, cut = cut,
      all = known.ahead, low = not known.last and optional_number(config, "sigma_min") or nil,
      high = not known.last and optional_number(config, "sigma_max") or nil, final = final,
      log_times = name == "EulerDiscreteScheduler" and config.timestep_type == "continuous"
        and config.prediction_type == "v_prediction" } }
  if known.sigma and spacing ~= "leading" then
    made.schedule.noise_scale = function(_, point) return point.sigma end
  end
  return made
end

--- The process of a scheduler's config, with its solver and spacing as what it samples with. Raises for a class, a key
-- or a value that is not known. options: tokens (of a picture, for a flow whose shift depends on them), mu (that
-- shift's number itself).
---@param config table  with _class_name
---@param options? { tokens?: integer, mu?: number }
---@return Process
return function(config, options)
  arguments.expect(WHO, "config", config, "a table")
  local o = arguments.read(WHO, options, { tokens = arguments.none, mu = arguments.none },
    { tokens = "an integer >= 1", mu = "a finite number" })
  local name = arguments.expect(WHO, "config._class_name", config._class_name, "a string")
  if not (discrete[name] or flows[name] or exploding[name]) then
    local names = {}
    for _, family in ipairs { discrete, flows, exploding } do
      for class in pairs(family) do names[#names + 1] = class end
    end
    table.sort(names)
    fail("%s: config._class_name: expected one of %s, got %s", WHO, table.concat(names, ", "), name)
  end
  config = read_config(config)
  if flows[name] then return straight(config, name, o) end
  if exploding[name] then return edm(config, name) end
  if discrete[name].ahead and value_of(config, "use_flow_sigmas", false) then
    return straight_multistep(config, name, discrete[name], o)
  end
  return table_of_betas(config, name, discrete[name])
end
