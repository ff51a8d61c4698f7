--- What ranks train where ways to train are compared: a small Llama on a book, in plain tables and tensors that go to
-- ranks as they are. Which rows a step has depends on the step and the seed alone: so many ranks with a share each see
-- what one rank with all of them sees.
local ty = require "tycho"
local arguments = require "tycho.arguments"

local M = {}

---@class RankWorkload
---@field training Tensor    tokens, i64 [n]
---@field held_out Tensor    rows of tokens, i64 [m, length + 1]
---@field length integer     tokens of a row
---@field config table       of the model

-- The arguments of recipes that train it.
M.arguments = {
  { "length", 64, "tokens of a row", quick = 16 },
  { "width", 96, "hidden size of the Llama", quick = 32 },
  { "layers", 4, "layers of it", quick = 2 },
  { "rows", 192, "held-out rows that are measured", quick = 8 },
}

local function check(who, work)
  arguments.expect("dist.workload." .. who, "work", work, "a table")
  if not ty.is_tensor(work.training) or not ty.is_tensor(work.held_out) or type(work.config) ~= "table" then
    arguments.fail("dist.workload.%s: work: expected what dist.workload.open gives, got %s", who,
      arguments.describe(work))
  end
end

--- A workload of the book that ships; chapters that are held out are spread over it. options: length (64), width (96),
-- layers (4), heads (one for 32 of the width), key_value_heads (as many as heads), rows (192: held-out rows), books
-- (1), chapters (math.huge: the first so many), vocabulary (512), config (other keys of config.json).
---@param options? table
---@return RankWorkload
function M.open(options)
  local none = arguments.none
  local o = arguments.read("dist.workload.open", options, { length = 64, width = 96, layers = 4, heads = none,
    key_value_heads = none, rows = 192, books = 1, chapters = math.huge, vocabulary = 512, config = {} },
    { length = "an integer >= 2", width = "an integer >= 1", layers = "an integer >= 1", heads = "an integer >= 1",
      key_value_heads = "an integer >= 1", rows = "an integer >= 1", books = "an integer in [1, 66]",
      chapters = "a number >= 10", vocabulary = "an integer >= 257", config = "a table" })
  local all = ty.data.documents(ty.data.kjv { books = o.books })
  local texts = { training = {}, held_out = {} }
  for i = 1, math.min(#all, o.chapters) do
    local part = texts[i % 10 == 5 and "held_out" or "training"]
    part[#part + 1] = all[i]
  end
  local tokenizer = ty.tokenizer.train(texts.training, { vocabulary = o.vocabulary })
  local tokens = {}
  for part, list in pairs(texts) do
    for i, text in ipairs(list) do list[i] = tokenizer:encode(text) end
    tokens[part] = ty.concat(list, 0):to "i64"
  end
  local wide = o.length + 1
  local rows = math.min(o.rows, tokens.held_out.shape[1] // wide)
  if rows == 0 or tokens.training.shape[1] <= wide then
    arguments.fail("dist.workload.open: length: a row of %d tokens is longer than the text", o.length)
  end
  local heads = o.heads or math.max(1, o.width // 32)
  local config = { vocab_size = tokenizer.size, hidden_size = o.width, num_hidden_layers = o.layers,
    intermediate_size = o.width * 8 // 3 // 16 * 16, num_attention_heads = heads,
    num_key_value_heads = o.key_value_heads, max_position_embeddings = o.length, tie_word_embeddings = true }
  for key, value in pairs(o.config) do config[key] = value end
  return { training = tokens.training, held_out = tokens.held_out:narrow(0, 0, rows * wide):reshape(rows, wide),
    length = o.length, config = config }
end

--- The untrained model, the same on all ranks.
---@param work RankWorkload
---@param seed integer
---@return LanguageModel
function M.model(work, seed)
  check("model", work)
  arguments.expect("dist.workload.model", "seed", seed, "an integer")
  ty.manual_seed(seed)
  return require "tycho.models.llama" (work.config)
end

-- Bits that are as good as random: Steele et al. 2014, "Fast Splittable Pseudorandom Number Generators".
local function mix(x)
  x = x + 0x9e3779b97f4a7c15
  x = (x ~ (x >> 30)) * 0xbf58476d1ce4e5b9
  x = (x ~ (x >> 27)) * 0x94d049bb133111eb
  return x ~ (x >> 31)
end

--- Rows of a step: the first `count` after `first` of those that it has.
---@param work RankWorkload
---@param seed integer
---@param step integer
---@param first integer  from 0
---@param count integer
---@return Tensor  i64 [count, length + 1]
function M.rows(work, seed, step, first, count)
  check("rows", work)
  arguments.expect("dist.workload.rows", "seed", seed, "an integer")
  arguments.expect("dist.workload.rows", "step", step, "an integer")
  arguments.expect("dist.workload.rows", "first", first, "an integer")
  arguments.expect("dist.workload.rows", "count", count, "an integer >= 1")
  local places, last = {}, work.training.shape[1] - work.length - 1
  for i = 1, count do
    places[i] = (mix(mix(seed * 1000003 + step) + first + i) >> 1) % last
  end
  local at = ty.tensor(places, { dtype = "i64" }):unsqueeze(1) + ty.arange(work.length + 1)
  return work.training:index_select(0, at:reshape(-1)):reshape(count, work.length + 1)
end

--- The loss over rows, nats per token.
---@param model LanguageModel
---@param rows Tensor  i64 [n, length + 1]
---@return Tensor loss
function M.loss(model, rows)
  arguments.expect("dist.workload.loss", "model", model, "a module")
  arguments.expect("dist.workload.loss", "rows", rows, "a tensor")
  if rows.ndim ~= 2 or rows.shape[2] < 2 then
    arguments.fail("dist.workload.loss: rows: expected [n, length + 1], got %s", arguments.describe(rows))
  end
  local length = rows.shape[2] - 1
  return model:loss(rows:narrow(1, 0, length):contiguous(), rows:narrow(1, 1, length):contiguous())
end

--- The loss over the held-out rows.
---@param model LanguageModel
---@param work RankWorkload
---@return number
function M.evaluate(model, work)
  check("evaluate", work)
  local total, n = 0.0, work.held_out.shape[1]
  ty.no_grad(function()
    for first = 0, n - 1, 32 do
      local count = math.min(32, n - first)
      ty.scope(function() total = total + count * M.loss(model, work.held_out:narrow(0, first, count)):item() end)
    end
  end)
  return total / n
end

return M
