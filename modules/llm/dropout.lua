--- Dropout for models whose published form has none, so that they can be trained on a small text for many epochs: what
-- a layer adds to the stream of hidden states (the outputs of attention and feed-forward) is dropped in training, as in
-- the first transformer and in GPT-2. Vaswani et al. 2017, section 5.4; Srivastava et al. 2014.
--
--     llm.dropout.attach(model, 0.1)     -- in training mode only; nothing is saved with the model
--     llm.dropout.remove(model)
local ty = require "tycho"
local arguments = require "tycho.arguments"

local expect = arguments.expect
local surgery = ty.nn.surgery
local M = {}

local wrapper = surgery.wrapper { name = "Dropped", field = "_dropped",
  describe = function(state) return ("dropout = %g"):format(state.share) end,
  forward = function(base)
    return function(self, x, residual, activation)
      local share = self._dropped.share
      if not self.training or share == 0 then return base.forward(self, x, residual, activation) end
      return surgery.finish(ty.dropout(base.forward(self, x), share), residual, activation)
    end
  end }

--- Puts dropout on a model's layers. share: of the outputs that become zero, [0, 1). targets: which linear layers, as
-- in nn.surgery.find(); those that write to the stream of a decoder by default (o_proj, down_proj).
---@param model Module
---@param share number
---@param targets? string|string[]|function
---@return integer layers  how many got it
function M.attach(model, share, targets)
  local who = "llm.dropout.attach"
  expect(who, "model", model, "a module")
  expect(who, "share", share, "a number in [0, 1)")
  local list = surgery.find(who, model, { targets = targets or { "o_proj", "down_proj" } })
  if #list == 0 then arguments.fail("%s: targets: no linear layer matches", who) end
  for _, layer in ipairs(list) do
    if wrapper:state(layer.module) then
      arguments.fail("%s: model: %s has dropout already; llm.dropout.remove takes it off", who, layer.name)
    end
  end
  for _, layer in ipairs(list) do wrapper:wrap(layer.module, { share = share }) end
  return #list
end

--- Takes it off again; a model without is left as it is.
---@param model Module
---@return integer layers  how many had it
function M.remove(model)
  local list = wrapper:wrapped("llm.dropout.remove", model)
  for _, layer in ipairs(list) do wrapper:unwrap(layer.module) end
  return #list
end

return M
