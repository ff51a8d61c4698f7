--- The copying memory task: symbols, a long gap, and the same symbols again. Who cannot reach back over the gap can say
-- no more than that something comes. Hochreiter and Schmidhuber 1997; Arjovsky et al. 2016, "Unitary Evolution
-- Recurrent Neural Networks".
--
--     local tokens, wanted = datasets.copying.draw(16, 1000, { seed = step })      -- two tensors [16, 1020]
--     local share = datasets.copying.share(model, datasets.copying.draw(500, 1000, { seed = 7 }))
local ty = require "tycho"
local arguments = require "tycho.arguments"

local M = {}

--- Tokens there are: 8 symbols, 0 to 7; what stands in the gap, 8; what asks for the symbols, 9. And how many symbols
-- a sequence has.
M.vocabulary, M.symbols, M.count = 10, 8, 10
local BLANK, ASK = 8, 9

--- Sequences of `count` symbols, `gap` blanks the last of which asks, and `count` more blanks, where the symbols are
-- wanted. The generator is left as it was. options: seed (0), device ("cpu"; the same on all), noise (false; true: the
-- gap is of random symbols in the place of blanks).
---@param n integer    sequences
---@param gap integer  positions between the symbols and where they are wanted
---@param options? { seed?: integer, device?: string, noise?: boolean }
---@return Tensor tokens  [n, gap + 2 * count] i64
---@return Tensor wanted  [n, count] i64: the symbols, at the last positions
function M.draw(n, gap, options)
  local who = "datasets.copying.draw"
  arguments.expect(who, "n", n, "an integer >= 1")
  arguments.expect(who, "gap", gap, "an integer >= 1")
  local o = arguments.read(who, options, { seed = 0, device = "cpu", noise = false }, { seed = "an integer",
    device = "a string", noise = "a boolean" })
  local rng = ty.rng_state()
  ty.manual_seed(o.seed)
  local symbols = ty.randint(0, M.symbols, { n, M.count })
  local function all(length, token) return ty.full({ n, length }, token, { dtype = "i64" }) end
  local between = o.noise and ty.randint(0, M.symbols, { n, gap - 1 }) or all(gap - 1, BLANK)
  ty.rng_state(rng)
  local tokens = ty.concat({ symbols, between, all(1, ASK), all(M.count, BLANK) }, 1)
  return tokens:to(o.device), symbols:to(o.device)
end

--- Logits [n, t, vocabulary or more] at the positions where symbols are wanted, [n, count, ...].
---@param logits Tensor
---@return Tensor
function M.answers(logits)
  if not ty.is_tensor(logits) or logits.ndim < 2 or logits.shape[2] < M.count then
    arguments.fail("datasets.copying.answers: logits: expected [n, t, ..] of at least %d positions, got %s", M.count,
      arguments.describe(logits))
  end
  return logits:narrow(1, logits.shape[2] - M.count, M.count)
end

--- The share of the wanted symbols that a model recalls, ten sequences at a time; chance is an eighth.
---@param model fun(tokens: Tensor): Tensor  logits [n, t, ...] of tokens [n, t]
---@param tokens Tensor
---@param wanted Tensor
---@return number
function M.share(model, tokens, wanted)
  local who = "datasets.copying.share"
  arguments.expect(who, "model", model, "a function")
  arguments.expect(who, "tokens", tokens, "a tensor")
  arguments.expect(who, "wanted", wanted, "a tensor")
  if tokens.ndim ~= 2 or wanted.ndim ~= 2 or wanted.shape[1] ~= tokens.shape[1] or wanted.shape[2] ~= M.count then
    arguments.fail("%s: expected tokens [n, t] and wanted [n, %d], got %s and %s", who, M.count,
      arguments.describe(tokens), arguments.describe(wanted))
  end
  local right, total = 0, tokens.shape[1]
  ty.no_grad(function()
    for i = 0, total - 1, 10 do
      ty.scope(function()
        local n = math.min(10, total - i)
        local logits = model(tokens:narrow(0, i, n))
        if not ty.is_tensor(logits) then
          arguments.fail("%s: model: expected it to give a tensor, got %s", who, arguments.describe(logits))
        end
        right = right + M.answers(logits):argmax(-1):eq(wanted:narrow(0, i, n)):to("f32"):sum():item()
      end)
    end
  end)
  return right / (total * M.count)
end

return M
