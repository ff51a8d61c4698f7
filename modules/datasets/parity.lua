--- Parities of random bits, of all so far, at every position: who has no state to keep finds none beyond the lengths
-- that it was trained on.
--
--     local bits, parity = datasets.parity.draw(64, 32, { seed = step })      -- two tensors [64, 32]
--     local near, far = datasets.parity.score(model, { trained = 32, longest = 256, seed = 7 })
local ty = require "tycho"
local arguments = require "tycho.arguments"

local M = {}

--- Bits and their parities. The generator is left as it was. options: seed (0), device ("cpu"; the same bits on all).
---@param n integer       sequences
---@param length integer  bits of each
---@param options? { seed?: integer, device?: string }
---@return Tensor bits    [n, length] i64, 0 and 1
---@return Tensor parity  likewise: whether the ones up to here, this one included, are odd in number
function M.draw(n, length, options)
  local who = "datasets.parity.draw"
  arguments.expect(who, "n", n, "an integer >= 1")
  arguments.expect(who, "length", length, "an integer >= 1")
  local o = arguments.read(who, options, { seed = 0, device = "cpu" }, { seed = "an integer", device = "a string" })
  local rng = ty.rng_state()
  ty.manual_seed(o.seed)
  local bits = ty.randint(0, 2, { n, length })
  ty.rng_state(rng)
  return bits:to(o.device), ty.remainder(ty.cumsum(bits, 1), 2):to(o.device)
end

--- Shares of right answers, at positions up to the length of the training and beyond it: of so many batches of
-- sequences, batch i of the seed `seed` + i. options: trained (bits of a sequence of the training), longest (bits of
-- these, more than that), batches (4), batch (64), seed (0), device ("cpu").
---@param model fun(bits: Tensor): Tensor  logits [batch, longest, 2] of bits [batch, longest]
---@param options { trained: integer, longest: integer, batches?: integer, batch?: integer, seed?: integer,
---  device?: string }
---@return number near
---@return number beyond
function M.score(model, options)
  local who = "datasets.parity.score"
  arguments.expect(who, "model", model, "a function")
  local o = arguments.read(who, options, { trained = arguments.none, longest = arguments.none, batches = 4, batch = 64,
    seed = 0, device = "cpu" }, { batches = "an integer >= 1", batch = "an integer >= 1", seed = "an integer" })
  arguments.expect(who, "trained", o.trained, "an integer >= 1")
  arguments.expect(who, "longest", o.longest, "an integer >= 1")
  if o.longest <= o.trained then
    arguments.fail("%s: longest: expected more than the %d bits of the training, got %d", who, o.trained, o.longest)
  end
  local near, beyond = 0, 0
  ty.no_grad(function()
    for i = 1, o.batches do
      ty.scope(function()
        local bits, parity = M.draw(o.batch, o.longest, { seed = o.seed + i, device = o.device })
        local logits = model(bits)
        if not ty.is_tensor(logits) then
          arguments.fail("%s: model: expected it to give a tensor, got %s", who, arguments.describe(logits))
        end
        local right = logits:argmax(-1):eq(parity):to "f32"
        near = near + right:narrow(1, 0, o.trained):mean():item() / o.batches
        beyond = beyond + right:narrow(1, o.trained, o.longest - o.trained):mean():item() / o.batches
      end)
    end
  end)
  return near, beyond
end

return M
