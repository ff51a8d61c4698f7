--- The gradient of embeddings made smaller: alpha e + (1 - alpha) detach(e) has the value of e and alpha times its
-- gradient. Zeng et al. 2023, "GLM-130B", section 2.2 and appendix B: embeddings, whose gradients are the largest early
-- in training, are where spikes of the loss begin; alpha is 0.1 there.
--
--     llm.shrink.attach(model, 0.1)     -- before training
--     llm.shrink.remove(model)
local ty = require "tycho"
local arguments = require "tycho.arguments"

local expect = arguments.expect
local surgery = ty.nn.surgery
local M = {}

local wrapper = surgery.wrapper { name = "Shrunk", field = "_shrunk",
  describe = function(state) return ("gradient * %g"):format(state.alpha) end,
  forward = function(base)
    return function(self, ...)
      local y, alpha = base.forward(self, ...), self._shrunk.alpha
      return y * alpha + y:detach() * (1 - alpha)
    end
  end }

--- Puts it on the embeddings of a model. A head with the weights of an embedding keeps its own share of the gradient.
---@param model Module
---@param alpha? number  share of the gradient that is left, [0, 1]; 0.1
---@param targets? string|string[]|function  which embeddings, as in nn.surgery.find(); all by default
---@return integer embeddings  how many got it
function M.attach(model, alpha, targets)
  local who = "llm.shrink.attach"
  expect(who, "model", model, "a module")
  alpha = expect(who, "alpha", alpha == nil and 0.1 or alpha, "a number in [0, 1]")
  local list = surgery.find(who, model, { kinds = { "embedding" }, targets = targets })
  if #list == 0 then arguments.fail("%s: targets: no embedding matches", who) end
  for _, layer in ipairs(list) do wrapper:wrap(layer.module, { alpha = alpha }) end
  return #list
end

--- Takes it off again; a model without is left as it is.
---@param model Module
---@return integer embeddings  how many had it
function M.remove(model)
  local list = wrapper:wrapped("llm.shrink.remove", model)
  for _, layer in ipairs(list) do wrapper:unwrap(layer.module) end
  return #list
end

return M
