--- Text from a model: greedy or sampled, for prompts of different lengths at once, as a stream or whole.
--
--     local tokens = model:generate(prompt, 100, { temperature = 0.8, top_p = 0.95, seed = 1 })
--     model:generate({ tok:encode "Hello", tok:encode "Good morning to" }, 100, {
--       tokenizer = tok, stop = { "\n\n" }, on_token = function(row, token) ... end })
local ty = require "tycho"
local sampling = require "tycho.llm.sampling"

local M = {}

local function check_tokens(t, what)
  if type(t) == "table" then
    if #t == 0 then error(("generate: %s has no tokens"):format(what), 4) end
    t = ty.tensor(t, { dtype = "i64" })
  end
  if not ty.is_tensor(t) or t.dtype ~= "i64" or t.ndim ~= 1 or t.shape[1] == 0 then
    error(("generate: %s must be a list of tokens or an i64 tensor [t]"):format(what), 4)
  end
  return t
end

--- Prompts as one tensor [n, t], shorter ones padded on the left, with the mask (nil when all are as long). A tensor
-- [n, t] stays as it is.
local function batch(prompts, pad, device)
  if ty.is_tensor(prompts) then
    if prompts.ndim ~= 2 or prompts.dtype ~= "i64" or prompts:numel() == 0 then
      error(("generate: tokens must be i64 [n, t] or a list of such rows, got %s %s"):format(prompts.dtype,
        "[" .. table.concat(prompts.shape, ", ") .. "]"), 3)
    end
    return prompts:to { device = device }, nil, nil
  end
  if type(prompts) ~= "table" or #prompts == 0 then error("generate: no prompts", 3) end
  local rows, longest = {}, 0
  for i, prompt in ipairs(prompts) do
    rows[i] = check_tokens(prompt, "prompt " .. i):to { device = device }
    longest = math.max(longest, rows[i].shape[1])
  end
  local padded, masks, uneven = {}, {}, false
  for i, row in ipairs(rows) do
    local missing = longest - row.shape[1]
    uneven = uneven or missing > 0
    padded[i] = row:pad({ missing, 0 }, "constant", pad)
    masks[i] = ty.ones({ row.shape[1] }, { dtype = "u8", device = device }):pad { missing, 0 }
  end
  return ty.stack(padded), uneven and ty.stack(masks):to "bool" or nil, rows
end

-- The set of tokens that end a row.
local function ending_tokens(model, o)
  local stop = o.stop_tokens
  if stop == nil then
    local generation = model.generation_config or {}
    stop = generation.eos_token_id or model:end_tokens()
  end
  if stop == nil or stop == ty.io.null or stop == false then return {} end
  if type(stop) ~= "table" then stop = { stop } end
  local set = {}
  for _, token in ipairs(stop) do set[token] = true end
  return set
end

--- The tokens that end a model's text as generate() sees it by itself, as a set: by generation_config.json or, without
-- it, by the config.
---@param model LanguageModel
---@return table<integer, boolean>
function M.ends(model)
  require("tycho.arguments").expect("generate.ends", "model", model, "a module")
  return ending_tokens(model, {})
end

-- Marks `tokens` [n, t] in seen [n, vocabulary].
local function mark_seen(seen, tokens, mask)
  if mask then tokens = ty.where(mask, tokens, tokens:narrow(1, tokens.shape[2] - 1, 1)) end
  return seen:scatter(1, tokens, 1)
end

-- Looks for stop strings at the end of each row's text. Only as much text is decoded as can hold one.
local function stop_watch(o, n)
  if #o.stop == 0 then return nil end
  if not o.tokenizer then error("generate: stop strings need the tokenizer option", 3) end
  local longest, rows = 0, {}
  for i, text in ipairs(o.stop) do
    if type(text) ~= "string" or text == "" then
      error(("generate: stop string %d must be text, got %s"):format(i, tostring(text)), 3)
    end
    longest = math.max(longest, #text)
  end
  for i = 1, n do rows[i] = {} end
  return function(row, token)
    local list = rows[row]
    list[#list + 1] = token
    -- A token has at least one byte, so these hold whatever ends with the newest one.
    local tail = o.tokenizer:decode(table.move(list, math.max(1, #list - longest), #list, 1, {}))
    for _, text in ipairs(o.stop) do
      if tail:find(text, 1, true) then return true end
    end
    return false
  end
end

-- Returns ended(row, token): whether the row ends with its new token.
local function stop_check(model, o, n)
  local ending, watch = ending_tokens(model, o), stop_watch(o, n)
  return function(row, token)
    local ended = ending[token] or watch and watch(row, token) or false
    return o.on_token and o.on_token(row, token) == false or ended
  end
end

-- The steps: next_logits(tokens, mask) gives [n, vocabulary] for what follows. Returns the new tokens, a list of all
-- rows for each step, and by row the number of steps after which it ended.
local function run(first, mask, count, o, ended, next_logits)
  local n = first.shape[1]
  local alive, finished, columns = n, {}, {}
  local seen
  local input = first
  for step = 1, count do
    local chosen, marked = ty.scope(function()
      local logits = next_logits(input, step == 1 and mask or nil)
      local now = seen
      if o.repetition_penalty ~= 1 then
        now = seen or ty.zeros(logits.shape, { dtype = "u8", device = logits.device })
        now = mark_seen(now, input, step == 1 and mask or nil)
      end
      return sampling.sample(logits, o, now and now:to "bool"), now
    end)
    seen, input = marked, chosen
    local list = chosen:flatten():tolist()
    for row = 1, n do
      local token = list[row]
      if finished[row] then
        list[row] = o.pad
      elseif ended(row, token) then
        finished[row], alive = step, alive - 1
      end
    end
    columns[step] = list
    if alive == 0 then break end
  end
  return columns, finished
end

-- One row, with a draft.
local function speculative(model, first, count, o, ended)
  if first.shape[1] ~= 1 then error("generate: with a draft, one row at a time", 3) end
  if o.repetition_penalty ~= 1 or o.cache then
    error("generate: a draft goes with neither repetition_penalty nor cache", 3)
  end
  local chosen = type(o.draft_tokens) == "table" and o.draft_tokens.choose
  if not chosen and (not math.tointeger(o.draft_tokens) or o.draft_tokens < 1) then
    error(("generate: draft_tokens must be a positive integer, got %s"):format(tostring(o.draft_tokens)), 3)
  end
  return require("tycho.llm.speculative").run(model, first, count, o, ended)
end

--- Continues tokens by up to `count` more. tokens: i64 [n, t], and the result is [n, t + new] (rows that ended early go
-- on with `pad`); or a list of rows of different lengths, and the result is a list of i64 tensors, each a prompt and
-- what follows it.
--
-- options: temperature (1; 0 takes the most likely token), top_k, top_p, min_p, repetition_penalty
-- (tycho.llm.sampling); seed (the draws are those of this seed, and the generator is left as it was); stop_tokens (one
-- or a list; by default eos_token_id of the model's files; false: none); stop (list of texts, with tokenizer);
-- on_token(row, token), called for each token as it comes, rows counted from 1, false ends the row; pad (0); draft (a
-- smaller model of the same tokens or an llm.FeatureDraft, which proposes draft_tokens, 4, at a time, or as many as an
-- llm.draft_length says; the text is distributed as without; stats, a table, gets rounds, drafted, accepted); cache (to
-- go on from, tokens then follow those in it); pictures (for models that see some: those of all rows, one after
-- another; sizes: of models that see tiles, what their processor says second); videos, video_sizes, video_seconds (for
-- models that see clips: what hub.video_processor's processor gives of those of all rows).
---@param model LanguageModel
---@param tokens Tensor|Tensor[]
---@param count integer
---@param options? table
---@return Tensor|Tensor[] tokens
function M.generate(model, tokens, count, options)
  local none = ty.nn.none
  local o = ty.nn.options("generate", options, { temperature = 1, top_k = 0, top_p = 1, min_p = 0,
    repetition_penalty = 1, seed = none, stop_tokens = none, stop = {}, tokenizer = none, on_token = none, pad = 0,
    cache = none, draft = none, draft_tokens = 4, stats = none, pictures = none, sizes = none,
    videos = none, video_sizes = none, video_seconds = none }, { pictures = "a tensor", sizes = "a tensor",
    videos = "a tensor", video_sizes = "a tensor", video_seconds = "a tensor", draft_tokens = "a number or a table" })
  if o.pictures and not model.picture_features then
    error(("generate: pictures: expected a model that sees them, got a %s"):format(getmetatable(model).__name), 2)
  end
  if o.videos and not model.video_token then
    error(("generate: videos: expected a model that sees clips, got a %s"):format(getmetatable(model).__name), 2)
  end
  if (o.pictures or o.videos) and o.draft then error("generate: a draft goes with no pictures", 2) end
  sampling.check("generate", o)
  if not math.tointeger(count) or count < 1 then
    error(("generate: the number of tokens must be a positive integer, got %s"):format(tostring(count)), 2)
  end
  local before = o.seed and ty.rng_state()
  if o.seed then ty.manual_seed(o.seed) end
  local ok, result = pcall(ty.no_grad, function()
    local prompts, mask, rows = batch(tokens, o.pad, model:device())
    local cache = o.cache or model:cache { room = prompts.shape[2] + count }
    local first, next_logits
    first, mask, next_logits = model:start(prompts, mask, cache, o.pictures, o.sizes,
      o.videos and { videos = o.videos, video_sizes = o.video_sizes, video_seconds = o.video_seconds })
    if rows and first ~= prompts then -- an encoder had the prompts
      for i in ipairs(rows) do rows[i] = first:select(0, i - 1) end
    end
    local columns, finished = {}, {}
    local ended = stop_check(model, o, first.shape[1])
    if o.draft then
      for i, token in ipairs(speculative(model, first, count, o, ended)) do columns[i] = { token } end
    else
      columns, finished = run(first, mask, count, o, ended, next_logits)
    end
    local new = ty.tensor(columns, { dtype = "i64", device = first.device }):transpose(0, 1)
    if not rows then return ty.concat({ first, new }, 1) end
    local results = {}
    for i, row in ipairs(rows) do
      results[i] = ty.concat { row, new:select(0, i - 1):narrow(0, 0, finished[i] or #columns) }
    end
    return results
  end)
  if before then ty.rng_state(before) end
  if not ok then error(result, 0) end
  return result
end

return M
