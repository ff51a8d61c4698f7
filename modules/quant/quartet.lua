--- Quartet: training in MXFP4 with all three products of every linear layer in four bits. Castro et al. 2025, "Quartet:
-- Native FP4 Training Can Be Optimal for Large Language Models", algorithm 1. And the policies that it is compared
-- with.
--
--     local report = quant.quartet.attach(model)              -- before training, from scratch
--     quant.linear.detach(model)
--
-- Forward: blocks of 32 are rotated by the Hadamard matrix, scaled by their standard deviation as QuEST does, rounded
-- to nearest. Backward: the gradient, and the weight and input as they were rounded, are rotated with new random signs,
-- made smaller by 3/4 so that nothing clips, and rounded stochastically: the mean of the product is the exact product
-- of what was rounded. The result passes where the forward pass did not clip, and is rotated back. What the paper and
-- the published code do not quantize is not here: embeddings, head, norms, attention scores.
local arguments = require "tycho.arguments"
local linear = require "tycho.quant.quant_linear"

local M = {}

-- A function for each name, so that a policy is made when it is asked for.
local policies = {
  quartet = function()
    local forward = { range = "quest", gradient = "clip" }
    local back = { rounding = "stochastic", shrink = 0.75 }
    return { forward = { hadamard = "fixed", x = forward, w = forward },
      input = { hadamard = "random", g = back, w = back }, weight = { hadamard = "random", g = back, x = back } }
  end,
  -- All six operands to nearest.
  nearest = function()
    return { forward = { x = {}, w = {} }, input = { g = {}, w = {} }, weight = { g = {}, x = {} } }
  end,
  -- All six stochastically, nothing clipped.
  stochastic = function()
    local q = { rounding = "stochastic", shrink = 0.75 }
    return { forward = { x = q, w = q }, input = { g = q, w = q }, weight = { g = q, x = q } }
  end,
  -- As LUQ (Chmiel et al. 2023, "Accurate Neural Training with 4-bit Matrix Multiplications at Standard Formats"): to
  -- nearest in the forward pass, whose operands serve the backward pass as they are; gradients stochastically, by their
  -- largest element. On the grid of MXFP4 in place of the powers of 2.
  luq = function()
    local g = { rounding = "stochastic", shrink = 0.75 }
    return { forward = { x = {}, w = {} }, input = { g = g }, weight = { g = g } }
  end,
  -- MXFP8: elements of E4M3.
  fp8 = function()
    local q = { element = "e4m3" }
    return { forward = { x = q, w = q }, input = { g = q, w = q }, weight = { g = q, x = q } }
  end,
  bf16 = function()
    local q = { element = "bf16" }
    return { forward = { x = q, w = q }, input = { g = q, w = q }, weight = { g = q, x = q } }
  end,
}

local names = '"quartet" or "nearest" or "stochastic" or "luq" or "fp8" or "bf16"'

--- A policy by its name: "quartet"; and what it is compared with, "nearest" and "stochastic" (all six operands of the
-- three products rounded so, by the largest element of a block), "luq" (to nearest forward, gradients alone
-- stochastically backward), "fp8" (MXFP8) and "bf16".
---@param name? string  "quartet"
---@return table policy  of quant.linear.policy
function M.policy(name)
  name = arguments.expect("quant.quartet.policy", "name", name == nil and "quartet" or name, names)
  return linear.policy(policies[name]())
end

--- Puts Quartet on the linear layers of a model, but for its head. options and report as quant.linear.attach has them.
---@param model Module
---@param options? { targets?: string|string[]|function, skip?: string[], head?: boolean }
---@return { layers: integer, share: number, left: string[] }
function M.attach(model, options)
  arguments.expect("quant.quartet.attach", "model", model, "a module")
  return linear.attach(model, M.policy(), options)
end

return M
