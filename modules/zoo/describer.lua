--- Captions of canvases (datasets.canvas) by the zoo's painter of them: pairs, networks, what is right in captions, and
-- pictures painted from embeddings. What recipes/vlm/vlv.lua does, on any painter of zoo.canvas.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local canvas = require "tycho.zoo.canvas"
local datasets = require "tycho.datasets"
local diffusion = require "tycho.diffusion"
local models = require "tycho.models"
local vlm = require "tycho.vlm"

local M = {}

local FIRST, LAST = 0, 1 -- tokens of the begin and the end of a caption: zoo.canvas.tokenizer

--- Canvases of a split as a painter sees them: latents [n, channels, rows, columns], tokens i64 [n, length], which
-- begin with the first mark and end in the last one, image u8, caption, labels (zoo.canvas.labels). options: those of
-- datasets.canvas, and from (0: the first item).
---@param painter TextToImage
---@param split string
---@param count integer
---@param options? table
---@return { latents: Tensor, tokens: Tensor, image: Tensor, caption: string[], labels: table<string, Tensor> }
function M.pairs(painter, split, count, options)
  arguments.expect("describer.pairs", "count", count, "an integer > 0")
  local o = { split = split }
  for key, value in pairs(options or {}) do o[key] = value end
  local from = o.from or 0
  o.from = nil
  local batch = datasets.load("canvas", o):batch(ty.arange(from, from + count))
  return { latents = ty.keep(painter:encode(batch.image)), image = batch.image, caption = batch.caption,
    tokens = painter:tokens(batch.caption):to { device = painter:device() }, labels = canvas.labels(batch) }
end

--- An encoder of canvases with fresh weights, a residual network and queries, for a painter; its embeddings begin near
-- the states of the empty caption. options: channels ({ 48,
-- 64 }: of the network, at 8 x 8 places and at 4 x 4), queries (as many as its captions have tokens), layers (2).
---@param painter TextToImage
---@param options? { channels?: integer[], queries?: integer, layers?: integer }
---@return VLVEncoder
function M.encoder(painter, options)
  local text = painter.text_encoder.config
  local o = arguments.read("describer.encoder", options, { channels = { 48, 64 },
    queries = text.max_position_embeddings, layers = 2 }, { channels = "a list of integers",
    queries = "an integer > 0", layers = "an integer > 0" })
  local blocks, rows = {}, painter.network.config.sample_size
  for i = 1, #o.channels do blocks[i] = 1 end
  local tower = models.ResNet { in_channels = painter.network.config.in_channels, classes = 1, channels = o.channels,
    blocks = blocks, small = true }
  local places = (rows >> (#o.channels - 1)) ^ 2 // 1 | 0
  local start = o.queries == text.max_position_embeddings and painter:null().text.embeddings:squeeze(0) or nil
  return vlm.vlv.Encoder(tower, { channels = o.channels[#o.channels], places = places, queries = o.queries,
    width = text.hidden_size, layers = o.layers, start = start }):to { device = painter:device() }
end

--- A captioner with a fresh decoder of the words of canvases around an encoder whose embeddings have so many numbers.
---@param encoder Module
---@param width integer
---@return VLVCaptioner
function M.captioner(encoder, width)
  arguments.expect("describer.captioner", "encoder", encoder, "a module")
  local decoder = models.Llama { vocab_size = #datasets.canvas.words + 2, hidden_size = 64, intermediate_size = 176,
    num_hidden_layers = 2, num_attention_heads = 4, max_position_embeddings = 128, tie_word_embeddings = true }
  -- The usual spread of 0.02 leaves the attention of narrow layers even for long.
  for name, p in decoder:named_parameters() do
    if p.ndim == 2 then ty.nn.init.normal(p, 0, name:find "embed" and 0.1 or p.shape[2] ^ -0.5) end
  end
  return vlm.vlv.Captioner(encoder, decoder:to { device = encoder:device() }, width):to { device = encoder:device() }
end

-- ---- what is right ----

local parts = {}
for name, words in pairs { style = "styles", kind = "kinds", ground = "grounds", colour = "colours", mark = "marks" } do
  parts[name] = {}
  for _, word in ipairs(datasets.canvas[words]) do parts[name][word] = true end
end

-- What a caption says: by part the word, or "none".
local function read(text)
  local said = { style = "none", kind = "none", ground = "none", colour = "none", mark = "none" }
  local thing, ground = text:match "^(.-) on (.*)$"
  for word in (thing or text):gmatch "%S+" do
    for _, name in ipairs { "style", "kind", "colour", "mark" } do if parts[name][word] then said[name] = word end end
  end
  for word in (ground or ""):gmatch "%S+" do if parts.ground[word] then said.ground = word end end
  return said
end

--- How right captions are: shares in which style, kind, ground, colour and mark are those of the truth, where not to
-- say one can be right as well; all, their mean; and whole, the share that are right word for word.
---@param captions string[]
---@param truth string[]
---@return table<string, number>
function M.score(captions, truth)
  local who = "describer.score"
  arguments.expect(who, "captions", captions, "a list of strings")
  arguments.expect(who, "truth", truth, "a list of strings")
  if #captions ~= #truth or #truth == 0 then
    arguments.fail("%s: truth: expected as many as the %d captions, got %d", who, #captions, #truth)
  end
  local shares = { style = 0, kind = 0, ground = 0, colour = 0, mark = 0, whole = 0 }
  for i, text in ipairs(captions) do
    local said, wanted = read(text), read(truth[i])
    for name in pairs(parts) do
      if said[name] == wanted[name] then shares[name] = shares[name] + 1 / #truth end
    end
    if text == truth[i] then shares.whole = shares.whole + 1 / #truth end
  end
  shares.all = (shares.style + shares.kind + shares.ground + shares.colour + shares.mark) / 5
  return shares
end

--- Captions that a captioner writes of x [n, ...].
---@param painter TextToImage
---@param captioner VLVCaptioner
---@param x Tensor
---@return string[]
function M.describe(painter, captioner, x)
  arguments.expect("describer.describe", "x", x, "a tensor")
  local list, length = {}, painter.text_encoder.config.max_position_embeddings
  for start = 0, x.shape[1] - 1, 128 do
    local part = x:narrow(0, start, math.min(128, x.shape[1] - start))
    local tokens = captioner:write(part, { first = FIRST, last = LAST, most = length })
    for _, ids in ipairs(tokens:tolist()) do
      local words = {}
      for _, id in ipairs(ids) do
        if id ~= FIRST and id ~= LAST then words[#words + 1] = painter.tokenizer:token(id) end
      end
      list[#list + 1] = table.concat(words, " ")
    end
  end
  return list
end

--- Trains a captioner on pairs(): vlm.vlv.caption() with the marks of canvases. x: what its encoder takes, in the place
-- of the pairs' latents.
---@param captioner VLVCaptioner
---@param batch table
---@param options table
---@param x? Tensor
---@return number loss
---@return number seconds
function M.teach(captioner, batch, options, x)
  local o = { last = LAST }
  for key, value in pairs(options) do o[key] = value end
  return vlm.vlv.caption(captioner, x or batch.latents, batch.tokens, o)
end

-- ---- pictures of embeddings ----

--- The states that a painter's text encoder gives captions, [n, length, width].
---@param painter TextToImage
---@param captions string[]
---@return Tensor
function M.states(painter, captions) return painter:condition(captions).text.embeddings end

--- Pictures u8 that a painter makes of embeddings [n, length, width] in the place of a text's states. options: steps
-- (20), guidance (4), seed (0).
---@param painter TextToImage
---@param embeddings Tensor
---@param options? { steps?: integer, guidance?: number, seed?: integer }
---@return Tensor
function M.paint(painter, embeddings, options)
  local who = "describer.paint"
  arguments.expect(who, "embeddings", embeddings, "a tensor")
  local o = arguments.read(who, options, { steps = 20, guidance = 4.0, seed = 0 }, { steps = "an integer > 0" })
  local n, c = embeddings.shape[1], painter.network.config
  local null, list = painter:null().text.embeddings, {}
  for start = 0, n - 1, 64 do
    local count = math.min(64, n - start)
    ty.manual_seed(o.seed + start)
    local noise = ty.randn(count, c.in_channels, c.sample_size, c.sample_size):to { device = painter:device() }
    local function text(x) return { text = { embeddings = x } } end
    list[#list + 1] = ty.no_grad(function()
      local latents = painter.process:sample(painter.network, noise.shape, { steps = o.steps, noise = noise,
        guidance = diffusion.guidance.classifier_free { scale = o.guidance },
        condition = text(embeddings:narrow(0, start, count)),
        null = text(null:expand(count, null.shape[2], null.shape[3])) })
      return painter:decode(latents)
    end)
  end
  return ty.concat(list, 0)
end

return M
