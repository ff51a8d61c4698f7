--- One model for text, pictures, volumes and video: all that is seen is a sequence of frames, a picture being one frame
-- and a volume a sequence of slices; one encoder gives features of places of each frame, one projector takes them to
-- one decoder. Frames that come in sequences are pooled, and places that look as they did in the frame before are left
-- out, while the others keep their positions. Jiang et al. 2025, "Hulu-Med: A Transparent Generalist Model towards
-- Holistic Medical Vision-Language Understanding"; what is left out and when, as in the code that it builds on, Zhang
-- et al. 2025, "VideoLLaMA 3: Frontier Multimodal Foundation Models for Image and Video Understanding".
--
--     local seen = hulu.see(frames, features, { threshold = 0.1 })       -- of a picture, a volume or a clip
--     local batch = hulu.pack({ { seen = seen, question = "...", answer = "..." } }, tokenizer)
--     local loss = hulu.loss(model, batch)
--     local right = hulu.ask(model, batch)                               -- a list of { kind, right }
--     hulu.fit(model, pools, tokenizer, { steps = 200 })                 -- by kinds, in stages
local ty = require "tycho"
local arguments = require "tycho.arguments"

local nn = ty.nn
local expect = arguments.expect
local M = {}

-- ---- what is seen ----

--- Which places of frames [f, c, h, w] are kept, bool [f, rows, columns]: all of the first frame, and of the others
-- those whose pixels are on average at least `threshold` away from what they were in the frame before. A threshold of 0
-- keeps all.
---@param frames Tensor
---@param rows integer
---@param columns integer
---@param threshold number
---@return Tensor
function M.changed(frames, rows, columns, threshold)
  local who = "hulu.changed"
  expect(who, "frames", frames, "a tensor")
  expect(who, "rows", rows, "an integer >= 1")
  expect(who, "columns", columns, "an integer >= 1")
  expect(who, "threshold", threshold, "a number >= 0")
  local shape = frames.shape
  if frames.ndim ~= 4 or frames:numel() == 0 or shape[3] % rows ~= 0 or shape[4] % columns ~= 0 then
    arguments.fail("%s: frames: expected [f, c, h, w] with h a multiple of %d and w of %d, got %s", who, rows, columns,
      arguments.describe(frames))
  end
  local first = ty.ones({ 1, rows, columns }):to { dtype = "bool", device = frames.device }
  if shape[1] == 1 then return first end
  local x = frames:to "f32"
  local moved = (x:narrow(0, 1, shape[1] - 1) - x:narrow(0, 0, shape[1] - 1)):abs()
  moved = moved:reshape(shape[1] - 1, shape[2], rows, shape[3] // rows, columns, shape[4] // columns):mean { 1, 3, 5 }
  return ty.concat({ first, moved:ge(threshold) }, 0)
end

--- Means of 2 x 2 places of features [f, rows, columns, width], rows and columns being even.
---@param features Tensor
---@return Tensor
function M.pooled(features)
  expect("hulu.pooled", "features", features, "a tensor")
  local shape = features.shape
  if features.ndim ~= 4 or shape[2] % 2 ~= 0 or shape[3] % 2 ~= 0 then
    arguments.fail("hulu.pooled: features: expected [f, rows, columns, width] with even rows and columns, got %s",
      arguments.describe(features))
  end
  return features:reshape(shape[1], shape[2] // 2, 2, shape[3] // 2, 2, shape[4]):mean { 2, 4 }
end

--- What a model sees of frames [f, c, h, w], whose features the encoder gave as [f, rows, columns, width]. options:
-- threshold (0.1: see changed()), pool (true: more than one frame is pooled 2 x 2 first). Returns { features = [kept,
-- width], positions = i64 [kept], length = places before any was left out, kept = bool [f, rows, columns] }. One frame
-- is seen whole: a volume of one slice is a picture.
---@param frames Tensor
---@param features Tensor
---@param options? { threshold?: number, pool?: boolean }
---@return { features: Tensor, positions: Tensor, length: integer, kept: Tensor }
function M.see(frames, features, options)
  local who = "hulu.see"
  expect(who, "frames", frames, "a tensor")
  expect(who, "features", features, "a tensor")
  local o = arguments.read(who, options, { threshold = 0.1, pool = true }, { threshold = "a number >= 0" })
  if frames.ndim ~= 4 or features.ndim ~= 4 or frames.shape[1] ~= features.shape[1] then
    arguments.fail("%s: expected frames [f, c, h, w] and features [f, rows, columns, width], got %s and %s", who,
      arguments.describe(frames), arguments.describe(features))
  end
  if o.pool and features.shape[1] > 1 then features = M.pooled(features) end
  local shape = features.shape
  local kept = M.changed(frames, shape[2], shape[3], o.threshold)
  local places = {}
  for i, keep in ipairs(kept:flatten():to("u8"):tolist()) do
    if keep == 1 then places[#places + 1] = i - 1 end
  end
  local positions = ty.tensor(places, { dtype = "i64" })
  return { features = features:flatten(0, 2):index_select(0, positions:to { device = features.device }),
    positions = positions, length = shape[1] * shape[2] * shape[3], kept = kept }
end

-- ---- rows of tokens ----

local known = setmetatable({}, { __mode = "k" })

local function encode(tokenizer, text)
  known[tokenizer] = known[tokenizer] or {}
  local ids = known[tokenizer][text]
  if not ids then
    ids = tokenizer:encode(text):tolist()
    known[tokenizer][text] = ids
  end
  return ids
end

local function check_samples(who, samples)
  expect(who, "samples", samples, "a list of tables")
  for i, sample in ipairs(samples) do
    if type(sample.question) ~= "string" or type(sample.answer) ~= "string" then
      arguments.fail("%s: samples: expected { question = string, answer = string }, got %s as number %d", who,
        arguments.describe(sample), i)
    end
  end
end

--- Samples one after the other in one row, none of which sees another: each is what is seen, if anything, then the
-- question and the answer, of which only the answer is learnt. Positions of text go on behind all places, whether these
-- were left out or not. samples: a list of { seen = of see() or nil, question, answer, kind }. Returns { tokens i64 [1,
-- n] (0 where something is seen), is_seen bool [1, n], features (a list), options (cu_seqlens, positions, longest, of
-- forward()), at, wanted i64 [learnt], owner (of each, the sample's number), samples }.
---@param samples table[]
---@param tokenizer Tokenizer
---@return table
function M.pack(samples, tokenizer)
  local who = "hulu.pack"
  check_samples(who, samples)
  if #samples == 0 then arguments.fail("%s: samples: expected at least one, got none", who) end
  local fields = ty.tokenizer.fields(tokenizer)
  if not fields or not fields.eos then
    arguments.fail("%s: tokenizer: expected one with a token of the end (eos), got %s", who,
      arguments.describe(tokenizer))
  end
  local ids, seen, positions, begins, longest = {}, {}, {}, { 0 }, 1
  local at, wanted, owner, features = {}, {}, {}, {}
  for i, sample in ipairs(samples) do
    local position = 0
    local function add(id, is_seen, where)
      ids[#ids + 1], seen[#seen + 1], positions[#positions + 1] = id, is_seen, where
    end
    if sample.seen then
      for _, where in ipairs(sample.seen.positions:tolist()) do add(0, 1, where) end
      features[#features + 1] = sample.seen.features
      position = sample.seen.length
    end
    for _, id in ipairs(encode(tokenizer, " " .. sample.question .. "\n")) do
      add(id, 0, position)
      position = position + 1
    end
    local answer = table.move(encode(tokenizer, " " .. sample.answer), 1, 1000, 1, {})
    answer[#answer + 1] = fields.eos
    for _, id in ipairs(answer) do
      at[#at + 1], wanted[#wanted + 1], owner[#owner + 1] = #ids - 1, id, i
      if id ~= fields.eos then
        add(id, 0, position)
        position = position + 1
      end
    end
    begins[#begins + 1], longest = #ids, math.max(longest, position)
  end
  local function row(list) return ty.tensor({ list }, { dtype = "i64" }) end
  return { tokens = row(ids), is_seen = row(seen):to "bool", features = features, owner = owner, samples = samples,
    at = ty.tensor(at, { dtype = "i64" }), wanted = ty.tensor(wanted, { dtype = "i64" }),
    options = { cu_seqlens = ty.tensor(begins, { dtype = "i64" }), positions = row(positions), longest = longest } }
end

-- ---- the model ----

--- A projector and a decoder, behind an encoder that is no part of it.
---@class Hulu: Module
---@field language_model LanguageModel
local Hulu = nn.module "Hulu"

--- language: a language model with embeddings as an option of hidden() (Llama and its like); width: of the encoder's
-- features.
---@param language LanguageModel
---@param width integer
function Hulu:init(language, width)
  expect("hulu.Model", "language", language, "a module")
  expect("hulu.Model", "width", width, "an integer >= 1")
  local hidden = language.config and language.config.hidden_size
    or arguments.fail("hulu.Model: language: expected a language model, got %s", arguments.describe(language))
  self.language_model = language
  self.linear_1 = nn.Linear(width, hidden)
  self.linear_2 = nn.Linear(hidden, hidden)
end

--- Features [n, width] of places as the decoder takes them, [n, hidden].
---@param features Tensor
---@return Tensor
function Hulu:project(features)
  expect("Hulu:project", "features", features, "a tensor")
  return self.linear_2(self.linear_1(features):gelu())
end

--- Logits [learnt, vocabulary] of the places of a batch of pack() that something is learnt at.
---@param batch table
---@return Tensor
function Hulu:forward(batch)
  expect("hulu.Model", "batch", batch, "a table")
  local decoder, device = self.language_model, self.linear_1.weight.device
  local tokens, is_seen = batch.tokens:to { device = device }, batch.is_seen:to { device = device }
  local x = decoder:embed(tokens)
  if #batch.features > 0 then
    local order = (is_seen:flatten():to("i64"):cumsum(0) - 1):clamp(0):reshape(tokens.shape)
    local features = self:project(ty.concat(batch.features, 0):to { device = device })
    x = ty.where(is_seen:unsqueeze(-1), ty.embedding(features, order):to(x.dtype), x)
  end
  local o = batch.options
  local hidden = decoder:hidden(tokens, { embeddings = x, cu_seqlens = o.cu_seqlens:to { device = device },
    positions = o.positions:to { device = device }, longest = o.longest, places = batch.at:to { device = device } })
  return decoder:head(hidden:select(0, 0))
end

M.Model = Hulu

--- Mean cross entropy of the answers of a batch of pack().
---@param model Hulu
---@param batch table
---@return Tensor
function M.loss(model, batch)
  expect("hulu.loss", "model", model, "a module")
  expect("hulu.loss", "batch", batch, "a table")
  return nn.cross_entropy(model(batch), batch.wanted:to { device = model.linear_1.weight.device })
end

--- Of each sample of a batch of pack(), as vlm.answers.shares() takes it: { kind, right }, right where the likeliest
-- token is the right one at each place of the answer, so that the greedy answer is right word for word.
---@param model Hulu
---@param batch table
---@return { kind: string, right: boolean }[]
function M.ask(model, batch)
  expect("hulu.ask", "model", model, "a module")
  expect("hulu.ask", "batch", batch, "a table")
  local hit = ty.no_grad(function()
    return model(batch):argmax(-1):eq(batch.wanted:to { device = model.linear_1.weight.device }):to("u8"):tolist()
  end)
  local found = {}
  for i, sample in ipairs(batch.samples) do found[i] = { kind = sample.kind or "question", right = true } end
  for k, i in ipairs(batch.owner) do found[i].right = found[i].right and hit[k] == 1 end
  return found
end

-- ---- learning, in stages ----

--- Kinds by stage, as shares of the steps: text alone, pictures beside it, then volumes and clips too, each kind as
-- often as every other of its stage.
M.stages = { { 0.2, { "text" } }, { 0.3, { "text", "picture" } }, { 0.5, { "text", "picture", "volume", "video" } } }

local function check_stages(who, stages, pools)
  local sum = 0
  for i, stage in ipairs(stages) do
    local share = type(stage) == "table" and stage[1]
    if type(share) ~= "number" or share < 0 or share ~= share or type(stage[2]) ~= "table" or #stage[2] == 0 then
      arguments.fail("%s: stages: expected { share of the steps, list of kinds }, got %s as number %d", who,
        arguments.describe(stage), i)
    end
    for _, kind in ipairs(pools and stage[2] or {}) do
      if type(pools[kind]) ~= "table" or #pools[kind] == 0 then
        arguments.fail("%s: pools: expected samples of each kind of the stages, got none of %s", who, tostring(kind))
      end
    end
    sum = sum + stage[1]
  end
  if math.abs(sum - 1) > 1e-6 then
    arguments.fail("%s: stages: expected shares of the steps that add up to 1, got %g", who, sum)
  end
end

-- The last step of each stage.
local function ends_of(stages, steps)
  local sum, ends = 0, {}
  for i, stage in ipairs(stages) do
    sum = sum + stage[1]
    ends[i] = i == #stages and steps or math.floor(sum * steps + 1e-9)
  end
  return ends
end

--- The schedule of stages: each is a training of its own, with a warm-up over a tenth of its steps and half a cosine
-- down to 0.05. One cosine over all would leave the kinds that come last little of the rate.
---@param stages table[]   as of M.stages
---@param steps integer
---@return fun(step: integer): number
function M.rates(stages, steps)
  local who = "hulu.rates"
  expect(who, "stages", stages, "a list of tables")
  expect(who, "steps", steps, "an integer >= 1")
  check_stages(who, stages)
  local list, milestones, from = {}, {}, 0
  for _, last in ipairs(ends_of(stages, steps)) do
    local count = last - from
    if count > 0 then -- of few steps a stage may get none
      list[#list + 1] = ty.optim.cosine { steps = count, warmup = math.max(1, count // 10), final = 0.05 }
      milestones[#milestones + 1], from = last, last
    end
  end
  return ty.optim.sequential(list, table.move(milestones, 1, #milestones - 1, 1, {}))
end

--- Trains a model on samples by kind, as of pack(), each stage at rates of its own (see rates()). options: steps (200),
-- batch (24 samples), lr (2e-3: the peak of each stage), seed (0), stages (M.stages; with one stage of all kinds they
-- are mixed from the start), watch(step, loss). Returns the mean loss of the last tenth of the steps.
---@param model Hulu
---@param pools table<string, table[]>
---@param tokenizer Tokenizer
---@param options? table
---@return number
function M.fit(model, pools, tokenizer, options)
  local who = "hulu.fit"
  expect(who, "model", model, "a module")
  expect(who, "pools", pools, "a table")
  local o = arguments.read(who, options, { steps = 200, batch = 24, lr = 2e-3, seed = 0, stages = M.stages,
    watch = arguments.none }, { steps = "an integer >= 1", batch = "an integer >= 1", lr = "a number > 0",
    seed = "an integer", stages = "a list of tables", watch = "a function" })
  check_stages(who, o.stages, pools)
  local opt = ty.optim.AdamW(model:parameters(), { lr = o.lr, beta2 = 0.95, clip_norm = 1, weight_decay = 0.05,
    schedule = M.rates(o.stages, o.steps) })
  local stage, ends, next_of = 1, ends_of(o.stages, o.steps), {}
  ty.manual_seed(o.seed)
  for kind, pool in pairs(pools) do next_of[kind] = #pool > 0 and ty.data.rounds(#pool, 1) or nil end
  local function draw(kind) return pools[kind][next_of[kind]()[1] + 1] end
  return ty.train.minimize(opt, o.steps, function(step)
    while step > ends[stage] do stage = stage + 1 end
    local kinds, list = o.stages[stage][2], {}
    for k = 1, o.batch do list[k] = draw(kinds[(k - 1) % #kinds + 1]) end
    return M.loss(model, M.pack(list, tokenizer))
  end, o.watch)
end

--- Asks a model all samples of a list, some at a time, as ask() does.
---@param model Hulu
---@param samples table[]
---@param tokenizer Tokenizer
---@return { kind: string, right: boolean }[]
function M.ask_all(model, samples, tokenizer)
  expect("hulu.ask_all", "model", model, "a module")
  expect("hulu.ask_all", "samples", samples, "a list of tables")
  local found, training = {}, model.training
  model:eval()
  for start = 1, #samples, 40 do
    local part = ty.scope(function()
      return M.ask(model, M.pack(table.move(samples, start, math.min(start + 39, #samples), 1, {}), tokenizer))
    end)
    table.move(part, 1, #part, #found + 1, found)
  end
  model:train(training)
  return found
end

-- What is asked in the end, without what was read before it.
local function last_line(question) return question:match "[^\n]*$":match "^%s*(.*)" end

--- What is answered without seeing: to each question of the test samples the answer that it has most often among those
-- of its kind in training. As ask() gives it.
---@param training table[]
---@param test table[]
---@return { kind: string, right: boolean }[]
function M.blind(training, test)
  check_samples("hulu.blind: training", training)
  check_samples("hulu.blind: test", test)
  local counts, best, found = {}, {}, {}
  for _, sample in ipairs(training) do
    local key = tostring(sample.kind) .. "\0" .. last_line(sample.question)
    counts[key] = counts[key] or {}
    local n = (counts[key][sample.answer] or 0) + 1
    counts[key][sample.answer] = n
    local so_far = best[key]
    local most = so_far and counts[key][so_far] or 0
    if n > most or n == most and sample.answer < so_far then best[key] = sample.answer end
  end
  for i, sample in ipairs(test) do
    local key = tostring(sample.kind) .. "\0" .. last_line(sample.question)
    found[i] = { kind = sample.kind or "question", right = best[key] == sample.answer }
  end
  return found
end

return M
