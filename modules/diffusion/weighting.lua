--- How much an error counts at each time. A weighting is a function (alpha, sigma, gain) of tensors that gives the
-- weight of the squared error of the prediction, or nil for 1 everywhere; gain is (d x0 / d prediction)^2, so that
-- `weight / gain` is the weight of the squared error of the clean sample, in which the papers are compared.
local ty = require "tycho"
local arguments = require "tycho.arguments"

local M = {}

--- Every error of the prediction alike: what Ho et al. 2020 call the simple loss.
function M.uniform()
  return function() return nil end
end

--- min(SNR, gamma) on the error of the clean sample: steps with little noise no longer outweigh all others. Hang et al.
-- 2023, "Efficient Diffusion Training via Min-SNR Weighting Strategy". options: gamma (5).
function M.min_snr(options)
  local o = ty.nn.options("weighting.min_snr", options, { gamma = 5 })
  arguments.expect("weighting.min_snr", "gamma", o.gamma, "a number > 0")
  return function(alpha, sigma, gain)
    return ((alpha / sigma) ^ 2):clamp(0, o.gamma) * gain
  end
end

--- SNR + 1 on the error of the clean sample, which is 1 on the error of v where alpha^2 + sigma^2 is 1: a network that
-- says clean samples learns small things, which show at little noise, as one that says v does. Salimans & Ho 2022,
-- "Progressive Distillation for Fast Sampling of Diffusion Models". options: most (1e6): a bound; a low one where
-- what hardly differs from its input should not outweigh all while the network is new.
function M.snr_plus_one(options)
  local o = ty.nn.options("weighting.snr_plus_one", options, { most = 1e6 })
  arguments.expect("weighting.snr_plus_one", "most", o.most, "a number > 0")
  return function(alpha, sigma, gain)
    return ((alpha / sigma) ^ 2 + 1):clamp(0, o.most) * gain
  end
end

--- (sigma^2 + data^2) / (sigma data)^2 on the error of the clean sample, which is 1 on the error of an edm prediction.
-- Karras et al. 2022. options: data (0.5: the data's standard deviation).
function M.edm(options)
  local o = ty.nn.options("weighting.edm", options, { data = 0.5 })
  return function(alpha, sigma, gain)
    local noise = sigma / alpha
    return (noise ^ 2 + o.data ^ 2) / (noise * o.data) ^ 2 * gain
  end
end

return M
