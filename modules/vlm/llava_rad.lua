--- Reports of pictures by a light adapter: a picture encoder of the domain and a language model stay as they are, and
-- what trains is the small network between them, then it and low-rank adapters of the language model. Zambrano Chaves
-- et al. 2024, "Towards a clinically accessible radiology foundation model: open-access and lightweight, with automated
-- evaluation" (LLaVA-Rad).
--
--     local pool = { reports = reports, looked = llava_rad.look(model, pictures) }
--     llava_rad.tune(model, dialogue, pool, llava_rad.align(model), { steps = 200 })       -- the projector alone
--     llava_rad.tune(model, dialogue, pool, llava_rad.adapt(model, { rank = 8 }), { steps = 200 })
--     local texts = llava_rad.write(model, dialogue, others)
--     local scores = llava_rad.likelihoods(model, dialogue, looked, reports)               -- [pictures, reports]
local ty = require "tycho"
local arguments = require "tycho.arguments"
local Dialogue = require "tycho.vlm.dialogue"
local peft = require "tycho.peft"

local nn = ty.nn
local expect = arguments.expect
local M = {}

--- What is asked for.
M.question = "what does the picture show?"

local function check(who, model, dialogue)
  expect(who, "model", model, "a module")
  if not model.multi_modal_projector or not model.vision_tower or not model.language_model then
    arguments.fail("%s: model: expected a Llava, got %s", who, arguments.describe(model))
  end
  if dialogue ~= nil and (type(dialogue) ~= "table" or not dialogue.rows) then
    arguments.fail("%s: dialogue: expected a Dialogue, got %s", who, arguments.describe(dialogue))
  end
end

-- ---- the parts, each by itself ----

local function fit(who, model, data, options, parameters, loss)
  local o = arguments.read(who, options, { steps = 100, batch = 32, lr = 3e-3, seed = 0 }, { steps = "an integer > 0",
    batch = "an integer > 0" })
  local loader = ty.data.DataLoader(ty.data.TensorDataset(data), { batch_size = o.batch, shuffle = true, seed = o.seed,
    drop_last = true, device = model:device() })
  ty.train.fit(model, loader, { steps = o.steps, lr = o.lr, warmup = 20, quiet = true, loss = loss,
    optimizer = function(_, more)
      return ty.optim.AdamW(parameters(o.lr), { lr = o.lr, beta2 = 0.95, clip_norm = 1, schedule = more.schedule,
        weight_decay = 0.05 })
    end })
end

--- Trains the tower of a model by itself to tell what each place of a picture shows. pictures [n, channels, height,
-- width], shown f32 [n, features, classes] of 0 and 1; options: steps (100), batch (32), lr (3e-3; the layer that tells
-- learns three times as fast), seed (0). Returns that layer.
---@param model Llava
---@param pictures Tensor
---@param shown Tensor
---@param options? table
---@return Module head
function M.know(model, pictures, shown, options)
  local who = "llava_rad.know"
  check(who, model)
  expect(who, "pictures", pictures, "a tensor")
  expect(who, "shown", shown, "a tensor")
  if shown.ndim ~= 3 or shown.shape[1] ~= pictures.shape[1] then
    arguments.fail("%s: shown: expected [n, features, classes] of %d pictures, got %s", who, pictures.shape[1],
      arguments.describe(shown))
  end
  local tower = model.vision_tower
  local head = nn.Linear(tower.config.hidden_size, shown.shape[3]):to { device = model:device() }
  if tower.learn_norms then tower:learn_norms(true) end
  fit(who, tower, { pictures = pictures, shown = shown:contiguous() }, options, function(lr)
    return { { params = tower:parameters() }, { params = head:parameters(), lr = lr * 3 } }
  end, function(_, batch) return nn.bce_with_logits(head(M.seen(model, batch.pictures)), batch.shown) * 10 end)
  if tower.learn_norms then tower:learn_norms(false) end
  model:eval()
  return head
end

--- Trains the language model of a model by itself on reports, without pictures. dialogue: one of no features; options
-- as of know().
---@param model Llava
---@param dialogue Dialogue
---@param reports string[]
---@param options? table
function M.read(model, dialogue, reports, options)
  local who = "llava_rad.read"
  check(who, model, dialogue == nil and {} or dialogue)
  expect(who, "reports", reports, "a list of strings")
  if dialogue.features ~= 0 then
    arguments.fail("%s: dialogue: expected one of 0 features, got %d", who, dialogue.features)
  end
  local turns = {}
  for i, text in ipairs(reports) do turns[i] = { { question = M.question, answer = text } } end
  local tokens, targets = dialogue:rows(turns)
  local language = model.language_model
  fit(who, language, { tokens = tokens, targets = targets }, options, function()
    return { { params = language:parameters() } }
  end, function(m, batch) return m:loss(batch.tokens, batch.targets) end)
  model:eval()
end

-- ---- what trains ----

--- Stage 1: all of a model is frozen but the projector, whose parameters are returned.
---@param model Llava
---@return Tensor[]
function M.align(model)
  check("llava_rad.align", model)
  model:requires_grad_(false)
  model.multi_modal_projector:requires_grad_(true)
  return model.multi_modal_projector:parameters()
end

--- Stage 2: low-rank adapters on the attention and the feed-forward networks of the language model, and the projector;
-- all else is frozen. options: rank (8), alpha (16). Returns what trains; peft.merge() puts the adapters into the
-- weights.
---@param model Llava
---@param options? { rank?: integer, alpha?: number }
---@return Tensor[]
function M.adapt(model, options)
  local who = "llava_rad.adapt"
  check(who, model)
  local o = arguments.read(who, options, { rank = 8, alpha = 16 }, { rank = "an integer >= 1", alpha = "a number > 0" })
  peft.lora(model, { rank = o.rank, alpha = o.alpha, save = { "multi_modal_projector" },
    targets = { "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj" } })
  return peft.parameters(model)
end

--- What the frozen tower gives of pictures [n, channels, height, width], computed once: [n, features, width].
---@param model Llava
---@param pictures Tensor
---@param batch? integer  (64)
---@return Tensor
function M.look(model, pictures, batch)
  local who = "llava_rad.look"
  check(who, model)
  expect(who, "pictures", pictures, "a tensor")
  expect(who, "batch", batch, "an integer >= 1 or nil")
  if pictures.ndim ~= 4 or pictures.shape[1] == 0 then
    arguments.fail("%s: pictures: expected [n, channels, height, width], got %s", who, arguments.describe(pictures))
  end
  local training = model.training
  model:eval()
  local features = ty.no_grad(ty.nn.in_parts, pictures, batch or 64, function(x) return M.seen(model, x) end)
  model:train(training)
  return features
end

--- What the tower gives of pictures, with gradients: [n, features, width], without the feature of the whole.
---@param model Llava
---@param pictures Tensor
---@return Tensor
function M.seen(model, pictures)
  check("llava_rad.seen", model)
  expect("llava_rad.seen", "pictures", pictures, "a tensor")
  local x = model.vision_tower:hidden(pictures:to { device = model:device() },
    { layer = model.config.vision_feature_layer })
  return x:narrow(1, 1, x.shape[2] - 1)
end

local function turns_of(reports)
  local list = {}
  for i, text in ipairs(reports) do list[i] = { { question = M.question, answer = text } } end
  return list
end

--- Trains what is given on pictures and their reports. pool: reports, and looked (of look()) or, where the tower trains
-- too, pictures. parameters: of align() or adapt(), or all. options: steps (100), batch (16), lr (1e-3), decay (0: of
-- weights), seed (0: the order), watch(step, loss). The norms of a tower that trains go by the batch. Returns the mean
-- loss of the last tenth of the steps.
---@param model Llava
---@param dialogue Dialogue
---@param pool { reports: string[], looked?: Tensor, pictures?: Tensor }
---@param parameters Tensor[]
---@param options? table
---@return number
function M.tune(model, dialogue, pool, parameters, options)
  local who = "llava_rad.tune"
  check(who, model, dialogue == nil and {} or dialogue)
  expect(who, "pool", pool, "a table")
  expect(who, "parameters", parameters, "a list")
  local o = arguments.read(who, options, { steps = 100, batch = 16, lr = 1e-3, decay = 0.0, seed = 0,
    watch = arguments.none }, { steps = "an integer > 0", batch = "an integer > 0", watch = "a function" })
  local given = pool.looked or pool.pictures
  expect(who, "pool.reports", pool.reports, "a list of strings")
  if not ty.is_tensor(given) or given.shape[1] ~= #pool.reports then
    arguments.fail("%s: pool: expected looked or pictures of %d reports, got %s", who, #pool.reports,
      arguments.describe(given))
  end
  local opt = ty.optim.AdamW(parameters, { lr = o.lr, beta2 = 0.95, clip_norm = 1, weight_decay = o.decay,
    schedule = ty.optim.cosine { steps = o.steps, warmup = math.max(1, o.steps // 10), final = 0.05 } })
  local state = ty.rng_state()
  ty.manual_seed(o.seed)
  local next_places = ty.data.rounds(#pool.reports, o.batch)
  local norms = not pool.looked and model.vision_tower.learn_norms
  if norms then model.vision_tower:learn_norms(true) end
  model:train()
  local last = ty.train.minimize(opt, o.steps, function()
    local places, reports = next_places(), {}
    for k, place in ipairs(places) do reports[k] = pool.reports[place + 1] end
    local chosen = given:index_select(0, ty.tensor(places, { dtype = "i64" }):to { device = given.device })
    local seen = pool.looked and chosen:to { device = model:device() } or M.seen(model, chosen)
    local tokens, targets = dialogue:rows(turns_of(reports))
    return model:loss(tokens:to { device = model:device() }, targets:to { device = model:device() },
      { features = model.multi_modal_projector(seen) })
  end, o.watch)
  ty.rng_state(state)
  if norms then model.vision_tower:learn_norms(false) end
  model:eval()
  return last
end

--- Both stages, one after the other, after which the adapters are in the weights and the model is a plain one. options:
-- align and adapt (steps of each), rank (8), and those of tune() but steps. Returns the mean loss at the end of each.
---@param model Llava
---@param dialogue Dialogue
---@param pool { reports: string[], looked: Tensor }
---@param options { align: integer, adapt: integer, rank?: integer }
---@return number align
---@return number adapt
function M.train(model, dialogue, pool, options)
  local who = "llava_rad.train"
  check(who, model, dialogue == nil and {} or dialogue)
  expect(who, "options", options, "a table")
  local o, own = arguments.read(who, { align = options.align, adapt = options.adapt, rank = options.rank },
    { align = 0, adapt = 0, rank = 8 }, { align = "an integer >= 1", adapt = "an integer >= 1",
    rank = "an integer >= 1" }), {}
  for key, value in pairs(options) do
    if o[key] == nil then own[key] = value end
  end
  own.steps = o.align
  local first = M.tune(model, dialogue, pool, M.align(model), own)
  own.steps = o.adapt
  local second = M.tune(model, dialogue, pool, M.adapt(model, { rank = o.rank, alpha = 2 * o.rank }), own)
  peft.merge(model)
  peft.remove(model)
  return first, second
end

-- ---- what is written ----

-- The texts that follow a prompt of `length` tokens in rows of tokens.
local function texts_of(dialogue, rows, length)
  local texts = {}
  for i = 0, rows.shape[1] - 1 do
    local ids, own = rows:select(0, i):tolist(), {}
    for k = length + 1, #ids do
      if ids[k] == dialogue.last then break end
      own[#own + 1] = ids[k]
    end
    texts[i + 1] = (dialogue.tokenizer:decode(own):gsub("^%s+", ""))
  end
  return texts
end

--- Reports that the language model draws by itself, without pictures: what it knows of reports. dialogue: one of no
-- features; options: most (64 tokens), seed (0).
---@param model Llava
---@param dialogue Dialogue
---@param count integer
---@param options? { most?: integer, seed?: integer }
---@return string[]
function M.draw(model, dialogue, count, options)
  local who = "llava_rad.draw"
  check(who, model, dialogue == nil and {} or dialogue)
  expect(who, "count", count, "an integer >= 1")
  local o = arguments.read(who, options, { most = 64, seed = 0 }, { most = "an integer >= 1", seed = "an integer" })
  if dialogue.features ~= 0 then
    arguments.fail("%s: dialogue: expected one of 0 features, got %d", who, dialogue.features)
  end
  local prompt = dialogue:prompt(M.question)
  local length = prompt.shape[2]
  model:eval()
  local tokens = prompt:expand(count, length):contiguous():to { device = model:device() }
  return texts_of(dialogue, model.language_model:generate(tokens, o.most, { seed = math.tointeger(o.seed),
    stop_tokens = dialogue.last }), length)
end

--- The report that a model writes of each picture, by its likeliest tokens. options: most (64 tokens), batch (50).
---@param model Llava
---@param dialogue Dialogue
---@param pictures Tensor
---@param options? { most?: integer, batch?: integer }
---@return string[]
function M.write(model, dialogue, pictures, options)
  local who = "llava_rad.write"
  check(who, model, dialogue == nil and {} or dialogue)
  expect(who, "pictures", pictures, "a tensor")
  local o = arguments.read(who, options, { most = 64, batch = 50 }, { most = "an integer >= 1",
    batch = "an integer >= 1" })
  local texts, count = {}, pictures.shape[1]
  local prompt = dialogue:prompt(M.question)
  model:eval()
  for start = 0, count - 1, o.batch do
    ty.scope(function()
      local rows = math.min(o.batch, count - start)
      local tokens = prompt:expand(rows, prompt.shape[2]):contiguous():to { device = model:device() }
      local result = model:generate(tokens, o.most, { temperature = 0, stop_tokens = dialogue.last,
        pictures = pictures:narrow(0, start, rows) })
      local own = texts_of(dialogue, result, prompt.shape[2])
      table.move(own, 1, rows, #texts + 1, texts)
    end)
  end
  return texts
end

--- How likely each report is as that of each picture: logarithms of probabilities, f32 [pictures, reports]. A picture's
-- features are computed once for all reports, none of which sees another. looked: of look().
---@param model Llava
---@param dialogue Dialogue
---@param looked Tensor
---@param reports string[]
---@return Tensor
function M.likelihoods(model, dialogue, looked, reports)
  local who = "llava_rad.likelihoods"
  check(who, model, dialogue == nil and {} or dialogue)
  expect(who, "looked", looked, "a tensor")
  expect(who, "reports", reports, "a list of strings")
  local turns = {}
  for i, text in ipairs(reports) do turns[i] = { question = M.question, answer = text } end
  model:eval()
  local device = model:device()
  return ty.no_grad(ty.scope, function()
    local batch = dialogue:packed { turns }
    local turn = batch.turn:flatten():index_select(0, batch.at) - 1
    local rows = {}
    for i = 0, looked.shape[1] - 1 do
      rows[i + 1] = ty.scope(function()
        local features = model.multi_modal_projector(looked:narrow(0, i, 1):to { device = device })
        local logs = Dialogue.likelihoods(model, batch, { features = features })
        return ty.zeros({ #reports }, { device = device }):scatter_add(0, turn:to { device = device }, logs)
      end)
    end
    return ty.stack(rows, 0)
  end)
end

--- Shares of pictures whose report is found among `among`, and of reports whose picture is, over groups of so many in
-- their order; what is left over is not counted. A report is as likely for a picture as likelihoods() says, less its
-- mean over the group's pictures, since some reports are likely for all; a picture is the one for which a report is
-- likeliest.
---@param model Llava
---@param dialogue Dialogue
---@param looked Tensor
---@param reports string[]
---@param among integer
---@return { reports: number, pictures: number }
function M.retrieval(model, dialogue, looked, reports, among)
  local who = "llava_rad.retrieval"
  check(who, model, dialogue == nil and {} or dialogue)
  expect(who, "looked", looked, "a tensor")
  expect(who, "reports", reports, "a list of strings")
  expect(who, "among", among, "an integer >= 2")
  if looked.shape[1] ~= #reports or #reports < among then
    arguments.fail("%s: expected looked of at least %d reports, as many as there are, got %s and %d", who, among,
      arguments.describe(looked), #reports)
  end
  local found, groups = { reports = 0, pictures = 0 }, #reports // among
  for group = 0, groups - 1 do
    local x = M.likelihoods(model, dialogue, looked:narrow(0, group * among, among),
      table.move(reports, group * among + 1, (group + 1) * among, 1, {}))
    local own = ty.arange(among, { device = x.device })
    local function share(best) return best:eq(own):to("f32"):mean():item() / groups end
    found.reports = found.reports + share((x - x:mean({ 0 }, true)):argmax(1))
    found.pictures = found.pictures + share(x:argmax(0))
  end
  return found
end

--- The nearest picture's report, which is what a model that writes has to beat: for each of `looked` [n, features,
-- width] the number, from 1, of the one among `known` whose mean feature has the largest cosine.
---@param looked Tensor
---@param known Tensor
---@return integer[]
function M.nearest(looked, known)
  local who = "llava_rad.nearest"
  expect(who, "looked", looked, "a tensor")
  expect(who, "known", known, "a tensor")
  if looked.ndim ~= 3 or known.ndim ~= 3 or looked.shape[3] ~= known.shape[3] then
    arguments.fail("%s: expected looked and known [n, features, width] of one width, got %s and %s", who,
      arguments.describe(looked), arguments.describe(known))
  end
  return ty.no_grad(ty.scope, function()
    local list = nn.normalize(looked:mean(1)):matmul(nn.normalize(known:mean(1)):transpose(0, 1)):argmax(1):tolist()
    for i, value in ipairs(list) do list[i] = value + 1 end
    return list
  end)
end

return M
