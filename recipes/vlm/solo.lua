-- One transformer over patches of pixels and words
-- claim: a model without a network of pictures learns to see, and keeps the text that it has read
-- system: SOLO at small size: raw patches through one linear layer, marks between rows, three stages mixed with text
-- paper: Chen et al. 2024, "A Single Transformer for Scalable Vision-Language Modeling"
-- time: 5 minutes on one CPU core
--
-- All begin with one small language model, which has read verses and the words of scenes: the zoo's has four thousand
-- tokens and is slow. LLaVA's shape gets as many operations in all: a small residual network learns the same classes
-- with those of the first stage, less what its features cost, and is frozen; the other stages are the same. Without the
-- first stage there are more steps of captions. The model that only reads is tuned on the same questions and text.
-- Settings were chosen on other scenes. A width of 128 with four layers had learnt nothing in the same time.
local ty = require "tycho"
local models, vlm, zoo = require "tycho.models", require "tycho.vlm", require "tycho.zoo"
local answerer, captioner, curriculum, scenes = zoo.answerer, zoo.captioner, zoo.curriculum, zoo.scenes

local r = ty.recipe.declare {
  seeds = 3,
  args = {
    { "side", 32, "pixels of a picture's side" },
    { "patch", 8, "pixels of a patch's side" },
    { "pool", 2000, "pictures of one object, and as many with captions", quick = 16 },
    { "classify", 80, "steps in which classes are written", quick = 1 },
    { "describe", 260, "steps in which captions are", quick = 1 },
    { "room", 1024, "tokens of a packed row, one each step", quick = 160 },
    { "lr", 4e-3, "peak learning rate of both" },
    { "text", 0.3, "of the tokens that are text alone" },
    { "tuned", 800, "scenes of instruction tuning, with eight questions each", quick = 4 },
    { "tune_steps", 220, "of it", quick = 1 },
    { "tune_batch", 8, "scenes of a step", quick = 2 },
    { "tune_lr", 4e-3, "peak learning rate of it" },
    { "read", 150, "steps in which the language model reads text alone", quick = 1 },
    { "verses", 1500, "that it reads", quick = 20 },
    { "test", 200, "scenes to measure with", quick = 4 },
    { "width", 64, "hidden size of the language model", quick = 32 },
    { "layers", 2, "of it", quick = 1 },
    { "choose", 0, "added to seeds of data, to choose settings by" },
  },
}
local args = r.args
local tokenizer, places = zoo.tokenizer "scene-vlm", args.side // args.patch
local reading, with_features = answerer.dialogue(tokenizer, 0), answerer.dialogue(tokenizer, places * places)
local size = { width = args.width, layers = args.layers, heads = 4, inner = args.width * 11 // 4, side = args.side }

-- A language model that has read.
local verses = captioner.verses(reading, "training", args.verses)
local unseen, bytes = captioner.verses(reading, "held_out", args.test)
local function bits(model) return captioner.bits(model, unseen, bytes) end
local function language() return r:place(function() return models.Llama(answerer.text_config(tokenizer, size)) end) end
ty.manual_seed(args.choose + 1000)
local reader = language()
answerer.spread(reader)
captioner.fit(reader, captioner.mixed(captioner.texts(reading, args.pool // 2, { seed = 1000, size = args.side }),
  verses, 0.6), { steps = args.read, lr = args.lr, room = args.room })
local before = bits(reader)
r:say("the language model has read after %.0f s: %.3f bits a byte", r:seconds(), before)

local function pictures_of(seed, most)
  local batch = captioner.pairs("training", args.pool, { seed = seed, size = args.side, objects = { 1, most } })
  batch.seen = scenes.pictures(batch.image):to { device = r.device }
  return batch
end
local function questions(split, count, seed)
  local options = captioner.options { seed = seed, size = args.side, questions = 8 }
  local batches = answerer.questions(split, count, options)
  for _, batch in ipairs(batches) do batch.seen = batch.pictures:to { device = r.device } end
  return batches
end
local test = questions("validation", args.test, args.choose)
local function project(model, seen) return model:picture_features(seen) end

local found, kept, shown = {}, {}, nil
local function note(i, seed, name, model, dialogue, losses)
  local shares = captioner.score(model, dialogue, test, project)
  found[name], kept[name] = found[name] or {}, kept[name] or {}
  found[name][i], kept[name][i] = shares.all, bits(model)
  r:say("seed %d, %s: %.3f answered (%s), losses%s, %.3f bits a byte, %.0f s", seed, name, shares.all,
    answerer.told(shares), (" %.2f"):rep(#losses):format(table.unpack(losses)), kept[name][i], r:seconds())
end

for i, seed in ipairs(r.seeds) do
  local classes, captions = pictures_of(args.choose + seed, 1), pictures_of(args.choose + 100 + seed, 2)
  local asked = questions("training", args.tuned, args.choose + 500 + seed)
  local function stages(classify, describe, tune)
    return { { words = classes.names, seen = classes.seen, steps = classify },
      { words = captions.captions, seen = captions.seen, steps = describe }, { questions = asked, steps = tune } }
  end
  local function options(text)
    return { project = project, texts = verses, share = text, room = args.room, lr = args.lr, batch = args.tune_batch,
      tune_lr = args.tune_lr, seed = seed }
  end

  local function solo(name, classify, describe, text)
    ty.manual_seed(seed)
    local model = r:place(function() return vlm.solo.Solo(reader, { patch = args.patch }) end)
    local dialogue = vlm.Dialogue(tokenizer, { picture = model:marks(places, places), before = " ", lead = " " })
    note(i, seed, name, model, dialogue, curriculum.run(model, dialogue, stages(classify, describe, args.tune_steps),
      options(text)))
    return model, dialogue
  end

  -- A network of pictures learns the classes with the operations of the first stage, less those of all pictures'
  -- features, which it could keep; so the other stages have as many steps as SOLO's.
  local function llava(model, dialogue)
    local first = curriculum.operations(model, dialogue, stages(1, 1, 1), options(args.text))[1]
    ty.manual_seed(seed)
    local network, steps, loss = curriculum.encoder(classes.seen, { classes.objects, classes.looks },
      { operations = args.classify * first, features = args.pool + args.tuned, lr = args.lr })
    r:say("LLaVA's shape: %d steps of its encoder, whose loss is %.2f", steps, loss)
    local with = r:place(function() return captioner.begin(tokenizer, size, reader, network) end)
    note(i, seed, "llava", with, with_features, curriculum.run(with, with_features,
      stages(0, args.describe, args.tune_steps), options(args.text)))
  end

  local model, dialogue = solo("solo", args.classify, args.describe, args.text)
  shown = shown or { model, dialogue }
  local blind = language()
  blind:load_state_dict(reader:state_dict())
  note(i, seed, "text", blind, reading, curriculum.run(blind, reading, { { questions = asked,
    steps = args.tune_steps } }, options(args.text)))
  llava(model, dialogue)
  solo("no classes", 0, args.describe + args.classify, args.text)
  solo("no text", args.classify, args.describe, 0)
end
-- What it answers about scenes of the test, one question of each.
local labels, some = {}, test[1]
for k = 1, math.min(8, #some.questions) do
  local asked = some.questions[k][(k - 1) % #some.questions[k] + 1]
  local prompt = shown[2]:prompt(asked.question)
  local said = shown[1]:generate(prompt, 6, { temperature = 0, pictures = some.seen:narrow(0, k - 1, 1) })
  local answer = said:narrow(1, prompt.shape[2], said.shape[2] - prompt.shape[2]):flatten():tolist()
  labels[k] = ("%s\n%s (%s)"):format(asked.question, tokenizer:decode(answer):gsub("<|endoftext|>.*", ""),
    asked.answer)
end
ty.plot.grid(some.image:narrow(0, 0, #labels), { columns = 4, scale = 8, labels = labels }):save(r:picture "asked.png")

local function over_seeds(list, fn)
  local values = {}
  for i, value in ipairs(list) do values[i] = fn(value, i) end
  return values
end
local function above(name) return over_seeds(found.solo, function(x, i) return x - found[name][i] end) end
local function of_before(name) return over_seeds(kept[name], function(x) return x / before end) end
local tensors = 0
for name in shown[1]:named_parameters() do tensors = tensors + (name:find "^language_model" and 0 or 1) end
os.exit(r:finish {
  { claim = "questions answered, more than by the model that only reads", values = above "text", baseline = found.text,
    bar = 0 },
  { claim = "tensors of weights that pictures go through before the language model", measured = tensors, bar = 1,
    below = true },
  { claim = "bits per byte of unseen text afterwards, of those before", values = of_before "solo", baseline = before,
    bar = 1.02, below = true },
  { claim = "questions answered, more than without the stage of classes", values = above "no classes",
    baseline = found["no classes"], bar = 0 },
  { claim = "questions answered, more than by LLaVA's shape with as many operations", values = above "llava",
    baseline = found.llava, bar = 0 },
  { claim = "bits per byte without text in the stages, of those before", values = of_before "no text", judged = false },
  { claim = "questions answered, more than without text in the stages", values = above "no text", judged = false },
  { claim = "questions answered, share, mean of the kinds", values = found.solo, judged = false },
}, true)
