--- Networks that draw canvases (datasets.canvas) from captions, and the judge of what they draw: what the recipes of
-- zoo/canvas-unet and zoo/canvas-judge do, and what recipes measure with.
local ty = require "tycho"
local datasets = require "tycho.datasets"
local diffusion = require "tycho.diffusion"
local models = require "tycho.models"
local painter = require "tycho.zoo.painter"
local scenes = require "tycho.zoo.scenes"
local shelf = require "tycho.zoo.shelf"
local arguments = require "tycho.arguments"

local nn, canvas = ty.nn, datasets.canvas
local M = {}

-- ---- the painter ----

local first, last = "<|startoftext|>", "<|endoftext|>"
local LENGTH = 12 -- tokens of the longest caption
local FOLD = 4 -- pixels of a side that are one place of a network

--- A tokenizer whose tokens are the words of captions of canvases.
---@return Tokenizer
function M.tokenizer()
  local vocabulary, added = { [first] = 0, [last] = 1 }, {}
  for i, word in ipairs(canvas.words) do vocabulary[word] = i + 1 end
  for i, content in ipairs { first, last } do
    added[i] = { id = i - 1, content = content, single_word = false, lstrip = false, rstrip = false, normalized = false,
      special = true }
  end
  local function piece(token) return { SpecialToken = { id = token, type_id = 0 } } end
  local function text(name) return { Sequence = { id = name, type_id = 0 } } end
  local made = ty.tokenizer.parse(ty.io.json_encode { version = "1.0", added_tokens = ty.io.array(added),
    normalizer = { type = "Lowercase" }, pre_tokenizer = { type = "WhitespaceSplit" },
    post_processor = { type = "TemplateProcessing", single = ty.io.array { piece(first), text "A", piece(last) },
      pair = ty.io.array { piece(first), text "A", piece(last), text "B", piece(last) },
      special_tokens = { [first] = { id = first, ids = ty.io.array { 0 }, tokens = ty.io.array { first } },
        [last] = { id = last, ids = ty.io.array { 1 }, tokens = ty.io.array { last } } } },
    model = { type = "WordLevel", vocab = vocabulary, unk_token = last } })
  local fields = ty.tokenizer.fields(made)
  fields.bos, fields.eos, fields.pad, fields.unk, fields.max_length = 0, 1, 1, 1, LENGTH
  return made
end

--- A painter of canvases with fresh weights: a U-Net with words by cross-attention in the shape of Stable Diffusion's,
-- a text encoder of CLIP's kind, and no autoencoder. options: widths ({ 56, 64 }: channels at 8 x 8 places of 4 x 4
-- pixels, and at 4 x 4), text (64: width of words), device.
---@param options? { widths?: integer[], text?: integer, device?: string }
---@return TextToImage
function M.painter(options)
  local o = arguments.read("zoo.canvas.painter", options, { widths = { 56, 64 }, text = 64, device = "cpu" },
    { widths = "a pair of integers >= 8", text = "an integer >= 8" })
  local components = nn.with_defaults({ device = o.device }, function()
    return {
      unet = models.UNet2DConditionModel { sample_size = canvas.side // FOLD, in_channels = 3 * FOLD * FOLD,
        out_channels = 3 * FOLD * FOLD,
        down_block_types = { "DownBlock2D", "CrossAttnDownBlock2D" },
        up_block_types = { "CrossAttnUpBlock2D", "UpBlock2D" }, block_out_channels = o.widths, layers_per_block = 1,
        cross_attention_dim = o.text, attention_head_dim = 4, norm_num_groups = 8,
        use_linear_projection = true, resnet_time_scale_shift = "scale_shift" },
      text_encoder = models.CLIPTextModel { vocab_size = #canvas.words + 2, hidden_size = o.text,
        intermediate_size = 2 * o.text, num_hidden_layers = 1, num_attention_heads = 4,
        max_position_embeddings = LENGTH, eos_token_id = 1, initializer_factor = 5 } }
  end)
  components.tokenizer = M.tokenizer()
  -- It says the clean picture: 48 numbers of noise at each place are nearly as many as the network has channels there.
  components.scheduler = { _class_name = "DDIMScheduler", num_train_timesteps = 1000, prediction_type = "sample",
    beta_schedule = "squaredcos_cap_v2", clip_sample = true, set_alpha_to_one = true, timestep_spacing = "trailing" }
  return diffusion.TextToImage { class = "StableDiffusionPipeline", classes = {}, components = components }
end

--- The painter that ships.
---@param options? table  of zoo.load
---@return TextToImage
function M.load(options) return diffusion.TextToImage(shelf.load("canvas-unet", options)) end

--- Trains a painter, network and text encoder, on canvases. options: those of datasets.canvas under `set`; steps,
-- batch (64), lr (0.02), seed (0), drop (0.1: captions left out, for guidance), text (true: the text encoder is trained
-- too), and those of train.fit. Returns the painter with averaged weights, if an average was asked for.
---@param made TextToImage
---@param options table
---@return TextToImage
---@return number[] losses
function M.train(made, options)
  local o = { set = {}, batch = 64, lr = 0.02, seed = 0, drop = 0.1, text = true }
  for key, value in pairs(options) do o[key] = value end
  local loader = ty.data.DataLoader(datasets.load("canvas", o.set), { batch_size = o.batch, shuffle = true,
    seed = o.seed, drop_last = true })
  local parts = nn.ModuleDict { unet = made.network, text_encoder = o.text and made.text_encoder or nil }
  local objective = painter.objective(made)
  local fit = { optimizer = scenes.muon, final = 0.02, quiet = true, title = "canvas",
    loss = function(m, batch)
      local encoder = made.prompts.readers[1]
      encoder.encoder = m.text_encoder or encoder.encoder
      return objective:loss(m.unet, made:encode(batch.image), painter.told(made, made:tokens(batch.caption), o.drop,
        o.text))
    end }
  for key, value in pairs(o) do
    if key ~= "set" and key ~= "batch" and key ~= "seed" and key ~= "drop" and key ~= "text" then fit[key] = value end
  end
  local losses, averaged = ty.train.fit(parts, loader, fit)
  painter.use(made, averaged.unet, averaged.text_encoder)
  return made, losses
end

--- The grid of styles and known kinds, one of each on a ground that shift (0) moves on: prompts, the numbers that they
-- ask for as M.labels gives them, and pictures as the data set draws them. styles, kinds: how many (all).
---@param shift? integer
---@param styles? integer
---@param kinds? integer
---@return { prompts: string[], labels: table<string, Tensor>, image: Tensor }
function M.grid(shift, styles, kinds)
  local list, prompts, labels = {}, {}, { style = {}, kind = {}, ground = {} }
  for style = 0, (styles or #canvas.styles) - 1 do
    for kind = 0, (kinds or canvas.known) - 1 do
      local item = { kind = kind, style = style, ground = (style + kind + (shift or 0)) % #canvas.grounds, hue = -1,
        mark = 0, near = (style + kind) // 2 % 2, mirror = kind % 2, x = 1, y = 1 }
      list[#list + 1], prompts[#prompts + 1] = item, canvas.caption(item)
      for name, values in pairs(labels) do values[#list] = item[name] end
    end
  end
  for name, values in pairs(labels) do labels[name] = ty.tensor(values, { dtype = "i64" }) end
  return { prompts = prompts, labels = labels, image = (canvas.draw(list)) }
end

--- What captions of things as they are ask for, start to start + count - 1 of the split "validation": the condition,
-- the labels, and which tokens name the thing, bool [count, tokens].
---@param made TextToImage
---@param start integer
---@param count integer
---@return { condition: table, labels: table<string, Tensor>, words: Tensor, count: integer }
function M.asked(made, start, count)
  local batch = datasets.load("canvas", { split = "validation", dyed = 0 }):batch(ty.arange(start, start + count))
  local tokens, names = made:tokens(batch.caption), {}
  for i, item in ipairs(batch.item) do names[i] = made.tokenizer:id(canvas.kinds[item.kind + 1]) end
  return { condition = made:condition(batch.caption), count = count,
    words = tokens:eq(ty.tensor(names, { dtype = "i64" }):unsqueeze(1)):to { device = made:device() },
    labels = { kind = batch.kind, style = batch.style, ground = batch.ground } }
end

-- ---- the judge ----

-- What a judge says, as outputs one after the other.
local sizes = { { "style", #canvas.styles }, { "kind", #canvas.kinds }, { "ground", #canvas.grounds },
  { "colour", #canvas.colours + 1 }, { "mark", #canvas.marks } }
local outputs = 0
for _, row in ipairs(sizes) do outputs = outputs + row[2] end

--- What a judge is asked of canvases: style, kind, ground, colour (6: a thing's own) and mark, i64 [n] each.
---@param batch table  of datasets.canvas
---@return table<string, Tensor>
function M.labels(batch)
  return { style = batch.style, kind = batch.kind, ground = batch.ground, mark = batch.mark,
    colour = ty.where(batch.hue:lt(0), #canvas.colours, (batch.hue + 30):floor_divide(60) % 6) }
end

local function folded(pictures) return ty.pixel_unshuffle(pictures:to "f32" / 127.5 - 1, FOLD) end

--- A judge with fresh weights: a residual network.
---@param channels? integer[]
---@return Module
function M.judge_network(channels)
  channels = channels or { 64, 96 }
  local blocks = {}
  for i = 1, #channels do blocks[i] = 1 end
  return models.ResNet { in_channels = 3 * FOLD * FOLD, classes = outputs, channels = channels, blocks = blocks,
    small = true }
end

--- Trains a judge on canvases of known and unknown kinds. options: steps, batch (64), seed (0), and those of train.fit.
---@param network Module
---@param options table
---@return Module
function M.train_judge(network, options)
  local o = { batch = 64, seed = 0 }
  for key, value in pairs(options) do o[key] = value end
  local sets = {}
  for i, split in ipairs { "training", "unknown_kinds", "held_out" } do
    sets[i] = ty.data.DataLoader(datasets.load("canvas", { split = split, seed = o.seed + 1000, length = 60000,
      moved = true }), {
      batch_size = math.max(1, o.batch // (i == 1 and 2 or 4)), seed = o.seed })
  end
  local fit = { lr = 3e-3, weight_decay = 0.02, final = 0.02, quiet = true, title = "judge", loss = function(m, batch)
    local loss = 0
    for k, part in ipairs { batch, sets[2]:next(), sets[3]:next() } do
      local logits, labels = m(folded(part.image)), M.labels(part)
      local at, sum = 0, 0
      for _, row in ipairs(sizes) do
        sum = sum + nn.cross_entropy(logits:narrow(1, at, row[2]), labels[row[1]])
        at = at + row[2]
      end
      loss = loss + sum * (k == 1 and 0.5 or 0.25)
    end
    return loss
  end }
  for key, value in pairs(o) do
    if key ~= "batch" and key ~= "seed" then fit[key] = value end
  end
  local _, averaged = ty.train.fit(network, sets[1], fit)
  return averaged:eval()
end

--- Says what canvases show.
---@class CanvasJudge
---@field network Module
local Judge = {}
Judge.__index = Judge

--- A judge of a network; without one, the judge that ships.
---@param network? Module
---@return CanvasJudge
function M.judge(network) return setmetatable({ network = network or shelf.load "canvas-judge" }, Judge) end

-- What a judge makes of pictures, computed where its network is, given on the CPU, where labels and measures are.
local BATCH = 256
local function in_batches(judge, pictures, fn)
  local list, n, there = {}, pictures.shape[1], { device = judge.network:device() }
  for start = 0, n - 1, BATCH do
    local x = pictures:narrow(0, start, math.min(BATCH, n - start)):to(there)
    list[#list + 1] = ty.no_grad(function() return fn(folded(x)):to { device = "cpu" } end)
  end
  return ty.concat(list, 0)
end

--- Style, kind, ground, colour and mark of pictures u8 [n, 3, 32, 32]: i64 [n] each, on the CPU.
---@param pictures Tensor
---@return table<string, Tensor>
function Judge:see(pictures)
  local logits, found, at = in_batches(self, pictures, self.network), {}, 0
  for _, row in ipairs(sizes) do
    found[row[1]] = logits:narrow(1, at, row[2]):argmax(1)
    at = at + row[2]
  end
  return found
end

--- Features of pictures, f32 [n, width], on the CPU.
---@param pictures Tensor
---@return Tensor
function Judge:features(pictures)
  return in_batches(self, pictures, function(x) return self.network:features(x) end)
end

--- Shares of pictures that show what was wanted, by name: of labels i64 [n] as M.labels gives them.
---@param pictures Tensor
---@param labels table<string, Tensor>
---@return table<string, number>
function Judge:shares(pictures, labels)
  local found, shares = self:see(pictures), {}
  for name, wanted in pairs(labels) do
    shares[name] = found[name]:eq(wanted:to { device = "cpu" }):to("f32"):mean():item()
  end
  return shares
end

--- What pictures of twice the size, u8 [n, 3, 64, 64], show that were asked for labels: shares of labels by name in the
-- whole, brought to the judge's size; again, in how many of its four squares of 32 x 32 pixels the thing itself is
-- seen, which a part of a picture that repeats nothing seldom is; rough, how many grey levels a pixel is from the mean
-- of its square of 2 x 2.
---@param pictures Tensor
---@param labels table<string, Tensor>
---@return table<string, number>
function Judge:large(pictures, labels)
  local x, n = pictures:to "f32", pictures.shape[1]
  local half = x:avg_pool2d(2)
  local found = self:shares(half:round():to "u8", labels)
  local squares = pictures:rearrange("n c (a h) (b w) -> (n a b) c h w", { h = canvas.side, w = canvas.side })
  local kind = labels.kind:unsqueeze(1):to { device = "cpu" }
  found.again = self:see(squares).kind:reshape(n, 4):eq(kind):to("f32"):sum(1):mean():item()
  found.rough = (x - half:interpolate({ x.shape[3], x.shape[4] })):square():mean():sqrt():item()
  return found
end

--- Pictures u8 [n, 3, h, w] at twice their size, bicubic: what Judge:large() sees of a small picture as it is.
---@param pictures Tensor
---@return Tensor
function M.enlarged(pictures)
  arguments.expect("zoo.canvas.enlarged", "pictures", pictures, "a tensor")
  if pictures.ndim ~= 4 then
    arguments.fail("zoo.canvas.enlarged: pictures: expected [n, 3, h, w], got %s", arguments.describe(pictures))
  end
  local size = { 2 * pictures:size(2), 2 * pictures:size(3) }
  return pictures:to("f32"):interpolate(size, nil, "bicubic", false):clamp(0, 255):round():to "u8"
end

-- ---- things to be drawn again ----

--- A thing in a picture, and what is asked for of it: in other styles and on other grounds.
---@class CanvasThing
---@field picture Tensor      u8 [3, 32, 32], plain
---@field item CanvasItem
---@field caption string      of the picture, with a token in the place of the thing
---@field items CanvasItem[]  what is asked for
---@field prompts string[]    in words, with a token in the place of the thing
---@field reference string[]  the same without the token
---@field named string[]      the same with the thing's own colour, marks and kind
---@field labels table<string, Tensor>

--- Captions of items. name: what the thing is called in the place of its colour, marks and kind.
---@param items CanvasItem[]
---@param name? string
---@return string[]
function M.captions(items, name)
  arguments.expect("canvas.captions", "items", items, "a list of tables")
  local list = {}
  for i, item in ipairs(items) do list[i] = canvas.caption(item, name) end
  return list
end

--- Things number start, start + 1, ... of the split "held_out". styles: numbers of those that are asked for, each on
-- two grounds. split: another split.
---@param start integer
---@param count integer
---@param token string
---@param styles integer[]
---@param split? string
---@return CanvasThing[]
function M.things(start, count, token, styles, split)
  local set = datasets.load("canvas", { split = split or "held_out", styles = { "plain" }, dyed = 1 })
  local batch, list = set:batch(ty.arange(start, start + count)), {}
  for i, item in ipairs(batch.item) do
    local thing = { picture = batch.image:select(0, i - 1), item = item,
      caption = canvas.caption(item, token), items = {} }
    local labels = { kind = {}, colour = {}, mark = {}, style = {}, ground = {} }
    for _, style in ipairs(styles) do
      for k = 1, 2 do
        local asked = { kind = item.kind, hue = item.hue, mark = item.mark, style = style, near = 1, mirror = 0, x = 1,
          y = 1, ground = (item.ground + k) % #canvas.grounds }
        table.insert(thing.items, asked)
        table.insert(labels.colour, (asked.hue + 30) // 60 % 6)
        for _, name in ipairs { "kind", "mark", "style", "ground" } do table.insert(labels[name], asked[name]) end
      end
    end
    for name, values in pairs(labels) do labels[name] = ty.tensor(values, { dtype = "i64" }) end
    thing.prompts, thing.reference = M.captions(thing.items, token), M.captions(thing.items, "")
    thing.named, thing.labels, list[i] = M.captions(thing.items), labels, thing
  end
  return list
end

--- A caption that names an item's kind and nothing of its colour and marks. style, ground: others than the item's.
---@param item CanvasItem
---@param style? integer
---@param ground? integer
---@return string
function M.named(item, style, ground)
  local asked = setmetatable({ style = style or item.style, ground = ground or item.ground }, { __index = item })
  return canvas.caption(asked, canvas.kinds[item.kind + 1])
end

--- Dyed and marked things that pairs are to be made of, as diffusion.subject.factory takes them: a plain picture and
-- mask of each, a prompt in one of two styles on another ground, and in `asked` the same in the other style and on the
-- other grounds.
---@param seed integer
---@param count integer
---@param styles integer[]
---@return table[]
function M.orders(seed, count, styles)
  local batch = datasets.load("canvas", { styles = { "plain" }, dyed = 1, seed = seed }):batch(ty.arange(count))
  local list = {}
  for i, item in ipairs(batch.item) do
    local style, ground = styles[i % 2 + 1], (item.ground + 1 + i % 3) % #canvas.grounds
    local prompt, others = M.named(item, style, ground), { M.named(item, styles[2 - i % 2], ground) }
    for k = 1, #canvas.grounds - 1 do others[k + 1] = M.named(item, style, (ground + k) % #canvas.grounds) end
    list[i] = { picture = batch.image:select(0, i - 1), mask = batch.mask:select(0, i - 1), rough = prompt,
      prompt = prompt, asked = others, item = item, style = style, ground = ground }
  end
  return list
end

--- Pairs of such things whose targets the data set draws.
---@param orders table[]
---@return SubjectPair[]
function M.rendered(orders)
  local items, made = {}, {}
  for i, each in ipairs(orders) do
    items[i] = { kind = each.item.kind, hue = each.item.hue, mark = each.item.mark, style = each.style,
      ground = each.ground, near = i % 2, mirror = i // 2 % 2, x = 1, y = 1 }
  end
  local image, mask = canvas.draw(items)
  for i, each in ipairs(orders) do
    made[i] = { picture = each.picture, mask = each.mask, prompt = each.prompt, target = image:select(0, i - 1),
      target_mask = mask:select(0, i - 1):to "f32", identity = 1, text = 1 }
  end
  return made
end

local seconds_of_step = {}

--- The painter that ships after it learnt a token from one picture in so many seconds: kind "inversion" (textual
-- inversion) or "finetune" (a LoRA of attention on a token that means nothing). options: token, seconds, lr, seed,
-- device, caption ("a " and the token: of the picture).
---@param kind string
---@param picture Tensor
---@param options { token: string, seconds: number, lr: number, seed: integer, device?: string, caption?: string }
---@return TextToImage
function M.taught(kind, picture, options)
  local o = options
  local set = { captions = {}, picture = function() return picture end }
  for i = 1, 8 do set.captions[i] = o.caption or "a " .. o.token end
  local function learnt(steps)
    local made = M.load { device = o.device or "cpu" }
    local width = made.text_encoder.config.hidden_size
    if not made.tokenizer:id(o.token) then diffusion.inversion.add(made, o.token, { ty.randn(1, width) * 0.1 }) end
    diffusion[kind].train(made, set, { steps = steps, batch = 8, lr = o.lr, seed = o.seed,
      token = kind == "inversion" and o.token or nil })
    return made
  end
  if not seconds_of_step[kind] then
    local began = ty.system.clock()
    learnt(3)
    seconds_of_step[kind] = (ty.system.clock() - began) / 3
  end
  return learnt(math.max(1, math.floor(o.seconds / seconds_of_step[kind])))
end

--- How far draw(thing), pictures of what was asked for of each of some things, shows that thing and what was said of
-- it: identity, the mean share of kind, colour and mark that are found, text, that of style and ground, both, the mean.
---@param list CanvasThing[]
---@param draw fun(thing: CanvasThing): Tensor
---@return { identity: number, text: number, both: number }
---@return Tensor[] pictures  on the CPU
function Judge:likeness(list, draw)
  local sum, drawn = { identity = 0, text = 0 }, {}
  for i, thing in ipairs(list) do
    drawn[i] = draw(thing):to { device = "cpu" }
    local s = self:shares(drawn[i], thing.labels)
    sum.identity = sum.identity + (s.kind + s.colour + s.mark) / 3 / #list
    sum.text = sum.text + (s.style + s.ground) / 2 / #list
  end
  sum.both = (sum.identity + sum.text) / 2
  return sum, drawn
end

return M
