--- Words for what one picture shows, said by a network that looks at the picture: a pseudo-word stands in a prompt, and
-- its embedding is what PromptNet makes of the picture, the noisy sample and its time. Zhou et al. 2023, "Enhancing
-- Detail Preservation for Customized Text-to-Image Generation: A Regularization-Free Approach".
--
--     local told = picture_words.new(painter, models.PromptNet { in_channels = 48, width = 64 }, { token = "<toy>" })
--     told:train(pictures, { steps = 300 })                 -- of many things, once: a <toy>
--     local mine = told:tuned(picture, { steps = 30 })      -- a few seconds for one picture
--     mine:paint(picture, { "a neon <toy> on a blue ground" }, { reference = { "a neon fish on a blue ground" } })
local ty = require "tycho"
local arguments = require "tycho.arguments"
local fusion_sampling = require "tycho.diffusion.fusion_sampling"
local inversion = require "tycho.diffusion.inversion"

local nn = ty.nn
local expect, fail = arguments.expect, arguments.fail
local M = {}

-- A table of tokens in which one token's row is another for each sample: state.rows [n, width].
local spoken = nn.surgery.wrapper { name = "Spoken", field = "_spoken", forward = function(base)
  return function(self, tokens)
    local state, y = self._spoken, base.forward(self, tokens)
    if not state.rows then return y end
    return ty.where(tokens:eq(state.id):unsqueeze(-1), state.rows:unsqueeze(1):to(y.dtype), y)
  end
end }

--- A network that is told in tokens and with a picture what to draw: model(x, t, { tokens, picture, scale }).
---@class PictureWords: Module
---@field promptnet Module
---@field words Tensor  the pseudo-words of the last call, [n, width]
local PictureWords = nn.module "PictureWords"

-- The root of the mean square of the numbers that stand for a painter's tokens other than one.
local function size_of_words(painter, token)
  local weight = painter.text_encoder.text_model.embeddings.token_embedding.weight
  local others = ty.arange(weight.shape[1], { device = weight.device }):ne(painter.tokenizer:id(token))
  return ty.no_grad(function()
    return (weight:square():mean { 1 } * others):sum():item() / others:sum():item()
  end) ^ 0.5
end

-- PromptNet speaks in units of the words that the text encoder knows. A word several times as long is all that its
-- layer norms see: the gradient is small then, and the word says the same of every picture.
function PictureWords:init(painter, promptnet, token)
  self.promptnet = promptnet
  rawset(self, "painter", painter) -- not among what is trained
  rawset(self, "unit", size_of_words(painter, token))
end

--- x [n, c, h, w], t [n]; condition: tokens i64 [n, tokens], picture [n, c, h, w] and scale [n], of the pseudo-word.
function PictureWords:forward(x, t, condition)
  local painter = self.painter
  local table_of_tokens = painter.text_encoder.text_model.embeddings.token_embedding
  local words = self.promptnet(condition.picture, x, t):select(1, 0) * self.unit
  rawset(self, "words", words)
  local state = spoken:state(table_of_tokens)
  state.rows = words * condition.scale:unsqueeze(1)
  local ok, text = pcall(painter.text_encoder, condition.tokens)
  state.rows = nil
  if not ok then error(text, 0) end
  return painter.network(x, t, { text = { embeddings = text } })
end

--- A painter that is told things in pictures, by a word that a network makes of each.
---@class PictureWordsPainter
---@field painter TextToImage
---@field network PictureWords
---@field token string
local Told = {}
Told.__index = Told

local function objective_of(painter)
  local objective = setmetatable({}, getmetatable(painter.process.objective))
  for key, value in pairs(painter.process.objective) do objective[key] = value end
  objective.drop = 0
  return objective
end

--- A painter that is told in pictures. The painter's networks are not trained and get no gradients kept; the token is
-- added to its tokenizer, where it is not there. options: token ("<it>").
---@param painter TextToImage   with one text encoder of CLIP's kind
---@param promptnet Module      models.PromptNet
---@param options? { token?: string }
---@return PictureWordsPainter
function M.new(painter, promptnet, options)
  local who = "picture_words.new"
  expect(who, "painter", painter, "a table")
  expect(who, "promptnet", promptnet, "a module")
  expect(who, "painter.prompts", painter.prompts, "a table")
  local o = arguments.read(who, options, { token = "<it>" })
  local encoder = painter.text_encoder
  if not encoder or not encoder.text_model or #painter.prompts.readers ~= 1 then
    fail("%s: painter: expected one with one text encoder of CLIP's kind, got %d encoders", who,
      #painter.prompts.readers)
  end
  if not painter.tokenizer:id(o.token) then
    inversion.add(painter, o.token, { ty.zeros(1, encoder.text_model.embeddings.token_embedding.weight.shape[2]) })
  end
  local embedding = encoder.text_model.embeddings.token_embedding
  if not spoken:state(embedding) then spoken:wrap(embedding, { id = painter.tokenizer:id(o.token) }) end
  for _, model in ipairs { painter.network, encoder } do
    for _, p in ipairs(model:parameters()) do p:requires_grad_(false) end
  end
  return setmetatable({ painter = painter, network = PictureWords(painter, promptnet, o.token), token = o.token }, Told)
end

-- What the network is told: tokens of prompts, latents of pictures (one or as many), the scale of the word.
local function condition_of(self, prompts, latents, scale)
  local n, device = #prompts, self.painter:device()
  local shape = latents.shape
  shape[1] = n
  return { tokens = self.painter:tokens(prompts):to { device = device }, picture = latents:expand(shape),
    scale = ty.full({ n }, scale, { device = device }) }
end

-- Options of training that train.fit does not know.
local own = { batch = true, penalty = true, prompt = true, noise = true, seed = true }

local function repeated(value, n)
  local list = {}
  for i = 1, n do list[i] = value end
  return list
end

-- Muon for all matrices, AdamW for the rest: with AdamW alone the loss falls half as far in as many steps.
local function muon(model, o)
  local matrices, rest = {}, {}
  for _, p in ipairs(model:parameters()) do table.insert(p.ndim >= 2 and matrices or rest, p) end
  return ty.optim.Muon({ { params = matrices }, { params = rest, matrices = false } }, { lr = o.lr, weight_decay = 0,
    schedule = o.schedule, clip_norm = o.clip_norm, adam_rate = 0.1 })
end

--- Trains the PromptNet to say words from which the network draws the pictures: the plain loss of denoising, with no
-- penalty on the words unless one is asked for. pictures: a loader of batches with the field image (u8 [n, 3, h, w]),
-- or such pictures, from which batches are drawn. options: steps (300), batch (16, of pictures), lr (0.03, of Muon),
-- penalty (0: times the mean square of the words), prompt ("a " and the token; a function of a batch that gives one for
-- each picture: what a prompt says besides the token, the word need not say), noise (0: a share u of the way to noise
-- below which pictures are not seen: there the sample itself shows what it is, and words are not asked), seed (0), and
-- those of train.fit.
---@param pictures Tensor|DataLoader
---@param options? table
---@return number[] losses
function Told:train(pictures, options)
  local who = "picture_words.train"
  local o = { steps = 300, batch = 16, lr = 0.03, penalty = 0, prompt = "a " .. self.token, noise = 0, seed = 0 }
  for key, value in pairs(options or {}) do o[key] = value end
  expect(who, "penalty", o.penalty, "a finite number >= 0")
  expect(who, "prompt", o.prompt, "a string or a function")
  expect(who, "noise", o.noise, "a number in [0, 1)")
  local painter, objective, loader = self.painter, objective_of(self.painter), pictures
  if o.noise > 0 then
    objective.times = function(schedule, n, device)
      return schedule:from_unit(ty.rand(n, { device = device }) * (1 - o.noise) + o.noise)
    end
  end
  if ty.is_tensor(pictures) then
    loader = ty.data.DataLoader(ty.data.TensorDataset { at = ty.arange(1) }, { batch_size = 1 })
  end
  local fit = { warmup = 10, optimizer = muon, final = 0.1, quiet = true, title = "words of pictures",
    loss = function(network, batch)
      local image = batch.image or pictures:index_select(0, ty.randint(0, pictures.shape[1], { o.batch },
        { device = pictures.device }))
      local x0, prompts = painter:encode(image), o.prompt
      if type(prompts) == "function" then
        prompts = expect(who, "what prompt returns", prompts(batch), "a list of strings")
      else
        prompts = repeated(prompts, image.shape[1])
      end
      if #prompts ~= image.shape[1] then
        fail("%s: prompt: expected %d, one for each picture, got %d", who, image.shape[1], #prompts)
      end
      local loss = objective:loss(network, x0, condition_of(self, prompts, x0, 1))
      if o.penalty == 0 then return loss end
      return loss + network.words:square():mean() * o.penalty
    end }
  for key, value in pairs(o) do
    if not own[key] then fit[key] = value end
  end
  return ty.data.with_seed(o.seed, function()
    local losses = ty.train.fit(self.network, loader, fit)
    self.network:eval()
    return losses
  end)
end

--- A painter of its own for one picture u8 [3, h, w]: a copy of the PromptNet, trained on it for a moment. options: as
-- of train; steps (30), batch (8).
---@param picture Tensor
---@param options? table
---@return PictureWordsPainter
function Told:tuned(picture, options)
  local o = { steps = 30, batch = 8, lr = 3e-3 }
  for key, value in pairs(options or {}) do o[key] = value end
  local network = PictureWords(self.painter, self.network.promptnet:clone(), self.token)
  local mine = setmetatable({ painter = self.painter, network = network, token = self.token }, Told)
  if o.steps > 0 then mine:train(picture:unsqueeze(0), o) end
  return mine
end

--- Pictures u8 [n, 3, h, w] of prompts with the token, which stands for what a picture u8 [3, h, w] shows. options:
--   s1 (3: guidance by the whole prompt), s2 (0: by reference prompts, a list of as many without the token)
--   times (0: of fusion before each step), fusion_scale (3), word_scale (0.8: of the word in fusion), eta (1)
--   steps (20), seed (0: of the first picture), solver
---@param picture Tensor
---@param prompts string[]
---@param options? table
---@return Tensor
function Told:paint(picture, prompts, options)
  local who = "picture_words.paint"
  expect(who, "picture", picture, "a tensor")
  expect(who, "prompts", prompts, "a list of strings")
  local o = arguments.read(who, options, { s1 = 3.0, s2 = 0.0, reference = arguments.none, times = 0,
    fusion_scale = 3.0, word_scale = 0.8, eta = 1.0, steps = 20, seed = 0, solver = arguments.none },
    { s1 = "a finite number", s2 = "a finite number", reference = "a list of strings", times = "an integer >= 0",
      steps = "an integer >= 1", seed = "an integer", solver = "a table" })
  if o.s2 ~= 0 and (not o.reference or #o.reference ~= #prompts) then
    fail("%s: reference: expected %d prompts, one for each, got %s", who, #prompts, arguments.describe(o.reference))
  end
  local painter, n = self.painter, #prompts
  local latents, empty, seeds = painter:encode(picture:unsqueeze(0)), {}, {}
  for i = 1, n do empty[i], seeds[i] = "", o.seed + i - 1 end
  local sampler = painter.process:sampler { steps = o.steps, solver = o.solver,
    guidance = fusion_sampling.guidance(o.s1, o.s2), parts = o.times > 0 and { fusion_sampling.fusion {
      times = o.times, scale = o.fusion_scale, eta = o.eta } } or {} }
  local shape = latents.shape
  shape[1] = n
  local x = sampler:sample(self.network, shape, { seeds = seeds, condition = condition_of(self, prompts, latents, 1),
    null = condition_of(self, empty, latents, 1), branches = {
      reference = o.reference and condition_of(self, o.reference, latents, 1),
      fusion = o.times > 0 and condition_of(self, prompts, latents, o.word_scale) or nil } })
  return painter:decode(x)
end

return M
