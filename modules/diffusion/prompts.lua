--- What the networks of pipelines are told: which text encoders read the prompts, what of these goes where, which sizes
-- come beside, how guidance is asked for, and the process for a size of picture, all by the pipeline's class in
-- model_index.json. A family is a row of the table at the end.
--
-- Rombach et al. 2022 (Stable Diffusion), Podell et al. 2023 (SDXL), Esser et al. 2024 (Stable Diffusion 3), Black
-- Forest Labs 2024 (Flux), Chen et al. 2024 (PixArt).
local ty = require "tycho"
local arguments = require "tycho.arguments"
local published = require "tycho.diffusion.published"
local spacings = require "tycho.diffusion.spacing"

local fail = arguments.fail
local WHO = "TextToImage"

-- ---- one text encoder with its tokenizer ----

local Reader = {}
Reader.__index = Reader

-- A prompt with what its own words stand for in their place, the longest words first.
local function spelled(prompt, words)
  local list = {}
  for word in pairs(words) do list[#list + 1] = word end
  table.sort(list, function(a, b) return #a > #b or #a == #b and a < b end)
  for _, word in ipairs(list) do
    prompt = prompt:gsub(word:gsub("%p", "%%%0"), (words[word]:gsub("%%", "%%%%")))
  end
  return prompt
end

-- Tokens [n, length] and mask of prompts; says once where one is longer than that.
function Reader:tokens(prompts)
  local tokenizer, length = self.tokenizer, self.length
  if next(self.words) then
    local written = {}
    for i, prompt in ipairs(prompts) do written[i] = spelled(prompt, self.words) end
    prompts = written
  end
  if not self.said and type(tokenizer) == "userdata" then -- others cut for themselves
    for i, ids in ipairs(tokenizer:encode_batch(prompts, { pad = false })) do
      if #ids > length then
        self.warn(("%s: prompts: the text encoder reads %d tokens, prompt %d has %d; the rest is cut (said once)")
          :format(WHO, length, i, #ids))
        self.said = true
        break
      end
    end
  end
  return tokenizer:encode_batch(prompts, { max_length = length, length = length })
end

-- What the encoder makes of prompts or of their tokens: run(encoder, tokens, mask).
function Reader:read(prompts, run)
  local tokens, mask = prompts, nil
  if not ty.is_tensor(prompts) then tokens, mask = self:tokens(prompts) end
  local device = self.encoder:device()
  return run(self.encoder, tokens:to { device = device }, mask and mask:to { device = device })
end

-- ---- families ----

-- The last hidden states and, where the encoder has one, the vector of the whole text.
local function both(encoder, tokens)
  local hidden, pooled = encoder(tokens)
  if ty.is_tensor(pooled) and hidden.ndim == 2 then hidden, pooled = pooled, hidden end
  return hidden, pooled
end

-- The hidden states before the last layer, and the vector of the whole text.
local function earlier(encoder, tokens) return encoder(tokens, { layer = -2 }) end

-- The last hidden states; what fills prompts up is read as well, as in training.
local function last(encoder, tokens) return (encoder(tokens)) end

-- The numbers as a row for each picture of `like`, f32 [n, #numbers].
local function rows(like, numbers)
  return ty.tensor(numbers, { dtype = "f32", device = like.device }):unsqueeze(0):expand(like.shape[1], #numbers)
end

-- x [n, t, width] with zeros after it, up to `width`.
local function widened(x, width)
  local room = width - x.shape[3]
  if room < 0 then
    fail("%s: text_encoder: expected hidden states of at most %d numbers, as the network takes them, got %d", WHO,
      width, x.shape[3])
  end
  return room == 0 and x or x:pad { 0, room }
end

local plain = { readers = { { "tokenizer", "text_encoder" } } }

function plain.text(self, prompts)
  local hidden, pooled = self.readers[1]:read(prompts, both)
  return { embeddings = hidden, pooled = pooled }
end

local sdxl = { readers = { { "tokenizer", "text_encoder" }, { "tokenizer_2", "text_encoder_2" } } }

function sdxl.text(self, prompts)
  local first = self.readers[1]:read(prompts, earlier)
  local second, pooled = self.readers[2]:read(prompts, earlier)
  return { embeddings = ty.concat({ first, second }, 2), pooled = pooled }
end

-- The picture is to look as if nothing of it had been cut away.
function sdxl.sizes(_, o) return { o.height, o.width, 0, 0, o.height, o.width } end

-- An empty prompt is told as zeros.
function sdxl.null(self, text, negatives)
  if self.options.force_zeros_for_empty_prompt == false then return text end
  local said = {}
  for i, negative in ipairs(negatives) do said[i] = negative ~= "" end
  said = ty.tensor(said, { device = text.embeddings.device }):unsqueeze(1)
  return { embeddings = ty.where(said:unsqueeze(2), text.embeddings, 0), pooled = ty.where(said, text.pooled, 0) }
end

local sd3 = { unit = "patch_size", readers = { { "tokenizer", "text_encoder" }, { "tokenizer_2", "text_encoder_2" },
  { "tokenizer_3", "text_encoder_3", length = 256, optional = true } } }

function sd3.text(self, prompts)
  local width = self.network.config.joint_attention_dim
  local first, pooled = self.readers[1]:read(prompts, earlier)
  local second, pooled_2 = self.readers[2]:read(prompts, earlier)
  local clip = widened(ty.concat({ first, second }, 2), width)
  local third = self.readers[3] and widened(self.readers[3]:read(prompts, last), width)
    or ty.zeros({ clip.shape[1], self.length or 256, width }, { dtype = clip.dtype, device = clip.device })
  return { embeddings = ty.concat({ clip, third:to(clip.dtype) }, 1), pooled = ty.concat({ pooled, pooled_2 }, 1) }
end

local flux = { guided = "guidance_embeds", unit = 2, trailing = true,
  readers = { { "tokenizer", "text_encoder" }, { "tokenizer_2", "text_encoder_2", length = 512 } } }

function flux.text(self, prompts)
  local _, pooled = self.readers[1]:read(prompts, both)
  return { embeddings = self.readers[2]:read(prompts, last), pooled = pooled }
end

local function pixart(length)
  local family = { unit = "patch_size", readers = { { "tokenizer", "text_encoder", length = length } } }

  function family.text(self, prompts)
    local lower = {}
    for i, prompt in ipairs(prompts) do lower[i] = prompt:lower():match "^%s*(.-)%s*$" end
    local seen
    local hidden = self.readers[1]:read(lower, function(encoder, tokens, mask)
      seen = mask
      return (encoder(tokens, { mask = mask }))
    end)
    return { embeddings = hidden, mask = seen }
  end

  function family.sizes(self, o)
    return self.network.config.use_additional_conditions and { o.height, o.width, o.height / o.width } or nil
  end

  return family
end

-- By the beginning of the class's name. Others are read as Stable Diffusion.
local families = { StableDiffusionXL = sdxl, StableDiffusion3 = sd3, Flux = flux, PixArtAlpha = pixart(120),
  PixArtSigma = pixart(300) }

-- The family of a pipeline. One that never had the second text encoder of its class is read by its first.
local function family_of(pipeline)
  local class, family = pipeline.class, plain
  for name, known in pairs(families) do
    if type(class) == "string" and class:sub(1, #name) == name then family = known end
  end
  local second = family.readers[2] and family.readers[2][2]
  for _, list in ipairs { pipeline.components, pipeline.classes or {}, pipeline.left_out or {} } do
    if second and list[second] then second = nil end
  end
  return second and plain or family
end

-- ---- prompts of a pipeline ----

--- What a pipeline's network is told of prompts, by the pipeline's class.
---@class Prompts
---@field guided boolean   the network is told the strength of guidance, and asked once a step
---@field unit integer     latents that sides have to be multiples of
---@field words table<string, string>  words of a painter's own, and the tokens that they stand for
local Prompts = {}
Prompts.__index = Prompts

local M = {}

--- A TextToImage, or an error.
---@param who string  in front of errors
---@param painter any
---@return TextToImage
function M.check_painter(who, painter)
  local class = getmetatable(painter)
  if type(class) ~= "table" or rawget(class, "__name") ~= "TextToImage" then
    arguments.fail("%s: painter: expected a TextToImage, got %s", who, arguments.describe(painter))
  end
  return painter
end

-- Raises where a component is missing.
local function component(pipeline, name)
  local part = pipeline.components[name]
  if part then return part end
  local reason = pipeline.left_out and pipeline.left_out[name]
  return fail("%s: pipeline.components.%s: expected one, got %s", WHO, name, reason or "nil")
end

M.component = component

-- How many tokens an encoder reads: o.length, what the tokenizer says, what the encoder has places for.
local function length_of(row, tokenizer, encoder, length)
  local room = encoder.config.max_position_embeddings
  if row.length then return length or row.length end
  local most = math.min(tokenizer.max_length or room or 512, room or 512)
  return length and (room and math.min(length, room) or length) or most
end

--- What a pipeline's network is told, by the pipeline's class. length: tokens of a prompt (of T5, where there is one
-- beside others); warn: a function of a text.
---@param pipeline Pipeline
---@param length? integer
---@param warn fun(text: string)
---@return Prompts
function M.new(pipeline, length, warn)
  local parts, family = pipeline.components, family_of(pipeline)
  local network = parts.unet or parts.transformer or component(pipeline, "unet or transformer")
  local self = setmetatable({ family = family, network = network, options = pipeline.options or {}, length = length,
    readers = {}, words = {}, scheduler = component(pipeline, "scheduler") }, Prompts)
  local long
  for _, row in ipairs(family.readers) do long = long or row.length end
  for i, row in ipairs(family.readers) do
    local there = parts[row[1]] and parts[row[2]]
    if there or not row.optional then
      local encoder, tokenizer = component(pipeline, row[2]), component(pipeline, row[1])
      local most = length_of(row, tokenizer, encoder, (row.length or not long) and length or nil)
      self.readers[i] = setmetatable({ tokenizer = tokenizer, encoder = encoder, length = most, warn = warn,
        words = encoder.text_model and self.words or {} }, Reader)
    end
  end
  self.guided = family.guided ~= nil
  local unit = family.unit
  self.unit = type(unit) == "string" and network.config[unit] or unit or 1
  return self
end

-- The same in the dtype that the network computes in.
local function converted(text, dtype)
  for _, key in ipairs { "embeddings", "pooled" } do
    if text[key] and text[key].dtype ~= dtype then text[key] = text[key]:to(dtype) end
  end
  return text
end

--- The dtype that a network computes in: that of most of its numbers.
---@param network Module
---@return Dtype
function M.dtype(network)
  local counts, most = {}, "f32"
  for _, p in ipairs(network:parameters()) do
    if p:is_floating_point() then counts[p.dtype] = (counts[p.dtype] or 0) + p:numel() end
  end
  for dtype, count in pairs(counts) do
    if count > (counts[most] or 0) then most = dtype end
  end
  return most
end

-- The condition of text for n pictures. o: height, width, guidance.
local function complete(self, text, o)
  local family = self.family
  local condition = { text = converted(text, M.dtype(self.network)) }
  local sizes = family.sizes and family.sizes(self, o)
  if sizes then condition.sizes = rows(text.embeddings, sizes) end
  if family.guided and self.network.config[family.guided] then
    condition.guidance = rows(text.embeddings, { o.guidance }):select(1, 0)
  end
  return condition
end

--- The condition of prompts, or, for pipelines with one text encoder, of their tokens. o: height, width (of the
-- picture), guidance. recorded: gradients reach the text encoders.
---@param prompts string[]|Tensor
---@param o table
---@param recorded? boolean
---@return table
function Prompts:condition(prompts, o, recorded)
  if ty.is_tensor(prompts) and self.family ~= plain then
    fail("TextToImage:condition: prompts: expected a list of strings (the pipeline has %d text encoders), got %s",
      #self.family.readers, arguments.describe(prompts))
  end
  if recorded then return complete(self, self.family.text(self, prompts), o) end
  return ty.no_grad(function() return complete(self, self.family.text(self, prompts), o) end)
end

--- The condition that guidance pushes away from: of negative prompts, a row for each; "" may mean zeros.
---@param negatives string[]
---@param o table
---@return table
function Prompts:null(negatives, o)
  return ty.no_grad(function()
    local text = self.family.text(self, negatives)
    if self.family.null then text = self.family.null(self, text, negatives) end
    return complete(self, text, o)
  end)
end

--- The process of a scheduler's config for latents of a size: flows with use_dynamic_shifting are shifted more for
-- large pictures.
---@param height integer  of the latents
---@param width integer
---@param config? table  the pipeline's
---@return Process
function Prompts:process(height, width, config)
  config = config or self.scheduler
  local process = published(config, { tokens = math.max(1, height * width // (self.unit * self.unit)) })
  if self.family.trailing and process.objective.predict == "flow" and not config.use_flow_sigmas then
    process.defaults.spacing = spacings.trailing()
  end
  return process
end

--- The text encoders.
---@return Module[]
function Prompts:encoders()
  local list = {}
  for _, reader in pairs(self.readers) do list[#list + 1] = reader.encoder end
  return list
end

--- Moves the text encoders.
function Prompts:to(options)
  for _, reader in pairs(self.readers) do reader.encoder:to(options) end
end

return M
