--- Schedulers by short names: configs of another class for a network whose own config says what it was trained for.
local arguments = require "tycho.arguments"

local M = {}

local function class(name, more) return { class = name, more = more or {} } end

local tables = {
  ddim = class "DDIMScheduler",
  ddpm = class "DDPMScheduler",
  pndm = class("PNDMScheduler", { skip_prk_steps = true }),
  lms = class "LMSDiscreteScheduler",
  euler = class "EulerDiscreteScheduler",
  euler_a = class "EulerAncestralDiscreteScheduler",
  heun = class "HeunDiscreteScheduler",
  dpm2 = class "KDPM2DiscreteScheduler",
  dpmpp_2m = class("DPMSolverMultistepScheduler", { algorithm_type = "dpmsolver++", solver_order = 2 }),
  dpmpp_3m = class("DPMSolverMultistepScheduler", { algorithm_type = "dpmsolver++", solver_order = 3 }),
  dpmpp_2m_sde = class("DPMSolverMultistepScheduler", { algorithm_type = "sde-dpmsolver++", solver_order = 2 }),
  dpmpp_2s = class("DPMSolverSinglestepScheduler", { algorithm_type = "dpmsolver++", solver_order = 2,
    lower_order_final = true }),
  unipc = class "UniPCMultistepScheduler",
  deis = class "DEISMultistepScheduler",
  lcm = class "LCMScheduler",
}
local flows = {
  euler = class "FlowMatchEulerDiscreteScheduler",
  heun = class "FlowMatchHeunDiscreteScheduler",
  dpmpp_2m = class("DPMSolverMultistepScheduler", { use_flow_sigmas = true, prediction_type = "flow_prediction" }),
  unipc = class("UniPCMultistepScheduler", { use_flow_sigmas = true, prediction_type = "flow_prediction" }),
  deis = class("DEISMultistepScheduler", { use_flow_sigmas = true, prediction_type = "flow_prediction" }),
}

-- What a network was trained with; the rest is how one samples.
local trained = {}
for key in ([[num_train_timesteps beta_start beta_end beta_schedule trained_betas prediction_type
  rescale_betas_zero_snr shift use_dynamic_shifting base_shift max_shift base_image_seq_len max_image_seq_len
  time_shift_type clip_sample clip_sample_range thresholding dynamic_thresholding_ratio sample_max_value
  timestep_spacing steps_offset set_alpha_to_one]]):gmatch "%S+" do trained[key] = true end

local curves = { karras = true, exponential = true, beta = true }

--- The config of the scheduler of that name for a network with this config: ddim, ddpm, pndm, lms, euler, euler_a,
-- heun, dpm2, dpmpp_2m, dpmpp_3m, dpmpp_2m_sde, dpmpp_2s, unipc, deis, lcm, of a flow euler, heun, dpmpp_2m, unipc,
-- deis; with _karras, _exponential or _beta behind it for such a spacing.
---@param config table  of the network's scheduler
---@param name string
---@return table config
function M.config(config, name)
  local who = "TextToImage:use"
  arguments.expect(who, "name", name, "a string")
  local flow = tostring(config._class_name):find "^FlowMatch" ~= nil
  local known = flow and flows or tables
  local base, curve = name, nil
  if not known[base] then
    base, curve = name:match "^(.*)_(%l+)$"
    if not curves[curve] then base = nil end
  end
  local found = known[base]
  if not found then
    local names = {}
    for key in pairs(known) do names[#names + 1] = key end
    table.sort(names)
    return arguments.fail("%s: name: expected one of %s, perhaps with _karras, _exponential or _beta, got %s", who,
      table.concat(names, ", "), name)
  end
  local made = { _class_name = found.class }
  for key, value in pairs(config) do
    if trained[key] then made[key] = value end
  end
  for key, value in pairs(found.more) do made[key] = value end
  if flow and made.use_flow_sigmas then made.flow_shift = config.shift end
  if curve then made[("use_%s_sigmas"):format(curve)] = true end
  return made
end

return M
