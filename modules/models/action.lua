--- A small model that sees, reads and acts: places of a picture, words of a task and the arm's joints go through a
-- decoder as Llama's; what it makes of one query at the end is the condition of a diffusion transformer over a chunk of
-- actions. After Li et al. 2024, "CogACT: A Foundational Vision-Language-Action Model" (a cognition token and a
-- diffusion action transformer). The tower is a few convolutions whose channels the words scale and shift (Brohan et
-- al. 2022, "RT-1", section 5.1), because it is trained from nothing.
--
--     local network = models.ActionModel { words = { "red", "reach", "the" }, text_config = { ... } }
--     local condition = network:encode { images = images, words = words, states = states }
--     local clean = network:denoise(x, t, condition)     -- x [n * m, horizon, 3], t [n * m]
local ty = require "tycho"
local arguments = require "tycho.arguments"
local configs = require "tycho.models.config"
local layers = require "tycho.models.layers"
local Llama = require "tycho.models.llama"
local Pretrained = require "tycho.models.pretrained"

local nn = ty.nn

-- ---- the tower ----

local Tower = nn.module "ActionTower"

function Tower:init(c, width)
  local channels = c.tower_channels
  self.stem = nn.Conv2d(c.num_channels, channels, c.patch_size // 2 + 2, { stride = c.patch_size // 2, padding = 1 })
  self.film = nn.Linear(width, 2 * channels)
  self.mix = nn.Conv2d(channels, channels, 3, { padding = 1 })
  self.down = nn.Conv2d(channels, width, 2, { stride = 2 })
  self.norm = nn.LayerNorm(width)
  self.position_embedding = layers.embedding((c.image_size // c.patch_size) ^ 2 // 1 | 0, width, 0.5)
end

-- images [n, channels, h, w] and what the words say in the mean [n, width]: [n, places, width].
function Tower:forward(images, said)
  local n = images.shape[1]
  local map = self.stem(images):gelu()
  local scale, shift = self.film(said):chunk(2, 1)
  map = map + self.mix((map * (scale:reshape(n, -1, 1, 1) + 1) + shift:reshape(n, -1, 1, 1)):gelu())
  return self.norm(self.down(map:gelu()):flatten(2):transpose(1, 2)) + self.position_embedding.weight
end

-- ---- the head ----

local HeadLayer = nn.module "ActionHeadLayer"

function HeadLayer:init(width, heads)
  self.heads = heads
  self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
  self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
  self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
end

--- What attention adds to h [n, horizon, width].
function HeadLayer:attend(h)
  local q, k, v = self.qkv(self.norm1(h)):chunk(3, -1)
  return self.proj(nn.attention(q, k, v, { heads = self.heads }))
end

--- What the feed-forward network adds to h.
function HeadLayer:feed(h) return self.fc2(self.fc1(self.norm2(h)):gelu()) end

function HeadLayer:forward(h)
  h = h + self:attend(h)
  return h + self:feed(h)
end

--- The diffusion transformer of actions. Time and query are added to every action.
local Head = nn.module "ActionHead"

function Head:init(c, hidden)
  local width = c.head_hidden_size
  self.frequencies = nn.Sinusoidal(64)
  self.time = nn.Sequential(nn.Linear(64, width), nn.SiLU(), nn.Linear(width, width))
  self.query, self.x = nn.Linear(hidden, width), nn.Linear(c.action_size, width)
  self.position_embedding = layers.embedding(c.horizon, width, 0.5)
  self.layers = nn.ModuleList {}
  for _ = 1, c.head_layers do self.layers:append(HeadLayer(width, c.head_heads)) end
  self.norm = nn.LayerNorm(width)
  self.out = nn.Linear(width, c.action_size)
end

--- Noised actions x [n, horizon, size] at times t [n] under queries [n, hidden], as what the layers get.
function Head:embed(x, t, query)
  return self.x(x) + self.position_embedding.weight
    + (self.query(query) + self.time(self.frequencies(t):to(x.dtype))):unsqueeze(1)
end

--- What the layers made, as clean actions.
function Head:read(h) return self.out(self.norm(h)) end

function Head:forward(x, t, query)
  local h = self:embed(x, t, query)
  for _, layer in ipairs(self.layers) do h = layer(h) end
  return self:read(h)
end

-- ---- all of it ----

---@class ActionModel: Pretrained
---@field language_model Llama
local ActionModel = nn.module("ActionModel", Pretrained)
ActionModel.model_type, ActionModel.architecture = "action_model", "ActionModel"

--- config: words (the vocabulary, in its order; number 0 is padding, 1 a word that it lacks), text_config (keys of a
-- Llama's config; vocab_size follows from the words), image_size (64), patch_size (8: pixels of a place), num_channels
-- (3), tower_channels (48), phrase_length (12: words), state_size (4: joints, which are angles, and last how far the
-- hand is closed), horizon (4: actions of a chunk), action_size (3: numbers of an action), head_hidden_size (96),
-- head_layers (3), head_heads (4).
---@param given table
function ActionModel:init(given)
  local who = "ActionModel"
  local config = configs.read(who, given, { words = { "texts" }, text_config = { "table" },
    image_size = { "count", 64 }, patch_size = { "count", 8 }, num_channels = { "count", 3 },
    tower_channels = { "count", 48 }, phrase_length = { "count", 12 }, state_size = { "count", 4 },
    horizon = { "count", 4 }, action_size = { "count", 3 }, head_hidden_size = { "count", 96 },
    head_layers = { "few", 3 }, head_heads = { "count", 4 } })
  if config.patch_size % 2 ~= 0 or config.image_size % config.patch_size ~= 0 then
    arguments.fail("%s: patch_size: expected an even number that divides image_size %d, got %d", who,
      config.image_size, config.patch_size)
  end
  self.config = config
  local text = {}
  for key, value in pairs(config.text_config) do text[key] = value end
  text.vocab_size, text.tie_word_embeddings = #config.words + 2, true
  self.language_model = Llama(text)
  local hidden = self.language_model.config.hidden_size
  self.vision_tower = Tower(config, hidden)
  self.state = nn.Linear(2 * config.state_size - 1, hidden)
  self.query = layers.embedding(1, hidden, 0.5)
  self.action_head = Head(config, hidden)
  self.places = (config.image_size // config.patch_size) ^ 2 // 1 | 0
end

local function check(who, c, observation)
  arguments.expect(who, "observation", observation, "a table")
  for _, key in ipairs { "images", "words", "states" } do
    arguments.expect(who, "observation." .. key, observation[key], "a tensor")
  end
  local images, words, states = observation.images, observation.words, observation.states
  local n = images.shape[1]
  if images.ndim ~= 4 or images.shape[2] ~= c.num_channels or images.shape[3] ~= c.image_size
    or images.shape[4] ~= c.image_size then
    arguments.fail("%s: observation.images: expected [n, %d, %d, %d], got %s", who, c.num_channels, c.image_size,
      c.image_size, arguments.describe(images))
  end
  if words.ndim ~= 2 or words.shape[1] ~= n or words.shape[2] ~= c.phrase_length then
    arguments.fail("%s: observation.words: expected [%d, %d], got %s", who, n, c.phrase_length,
      arguments.describe(words))
  end
  if states.ndim ~= 2 or states.shape[1] ~= n or states.shape[2] ~= c.state_size then
    arguments.fail("%s: observation.states: expected [%d, %d], got %s", who, n, c.state_size,
      arguments.describe(states))
  end
end

--- What the tower sees, [n, places, hidden]: of pictures [n, channels, h, w] in [-1, 1] where words i64 [n, phrase] are
-- said.
---@param images Tensor
---@param words Tensor
---@return Tensor
function ActionModel:see(images, words)
  arguments.expect("ActionModel:see", "images", images, "a tensor")
  arguments.expect("ActionModel:see", "words", words, "a tensor")
  local there = words:ne(0):to(images.dtype):unsqueeze(-1)
  local said = (self.language_model:embed(words) * there):sum { 1 } / there:sum({ 1 }):clamp(1)
  return self.vision_tower(images, said)
end

--- What the decoder gets, [n, places + phrase + 2, hidden]: the picture, the words, the joints, the query.
-- observation: images [n, channels, size, size] in [-1, 1], words i64 [n, phrase], states [n, numbers]; seen: what
-- see() made of images and words, where that is there.
---@param observation {images: Tensor, words: Tensor, states: Tensor, seen?: Tensor}
---@return Tensor
function ActionModel:embed(observation)
  check("ActionModel:embed", self.config, observation)
  local words, states, joints = observation.words, observation.states, self.config.state_size - 1
  -- Directions of the links, of which the place of the hand is a sum.
  local angles = states:narrow(1, 0, joints):cumsum(1)
  local state = self.state(ty.concat({ angles:cos(), angles:sin(), states:narrow(1, joints, 1) }, 1)):unsqueeze(1)
  local n = words.shape[1]
  return ty.concat({ observation.seen or self:see(observation.images, words), self.language_model:embed(words), state,
    self.query.weight:unsqueeze(0):expand(n, 1, state.shape[3]) }, 1)
end

--- The last position [n, hidden] of embeddings [n, t, hidden], through the decoder. options: positions (i64 [n, t];
-- they count from 0), list (layers; those of the decoder).
---@param embeddings Tensor
---@param options? table
---@return Tensor
function ActionModel:decode(embeddings, options)
  local who = "ActionModel:decode"
  arguments.expect(who, "embeddings", embeddings, "a tensor")
  local none = arguments.none
  local o = arguments.read(who, options, { positions = none, list = none }, { positions = "a tensor",
    list = "a table" })
  local body = self.language_model.model
  local stream, more = layers.through(o.list or body.layers, embeddings, self:turns(embeddings, o.positions), false, 1)
  local _, x = layers.add_norm(body.norm, stream, more)
  return x:squeeze(1)
end

--- What layers of the decoder are told of tokens [n, t, hidden] at positions (i64 [n, t]; nil: from 0).
---@param embeddings Tensor
---@param positions? Tensor
---@return table at
function ActionModel:turns(embeddings, positions)
  arguments.expect("ActionModel:turns", "embeddings", embeddings, "a tensor")
  local rotary, c = self.language_model.rotary, self.config
  local cos, sin = rotary:table(self.places + c.phrase_length + 2, embeddings.device)
  if positions then
    return { cos = ty.embedding(cos, positions):unsqueeze(1), sin = ty.embedding(sin, positions):unsqueeze(1),
      interleaved = false }
  end
  local t = embeddings.shape[2]
  return { cos = cos:narrow(0, 0, t), sin = sin:narrow(0, 0, t), interleaved = false }
end

--- The condition of actions, computed once for all samples and steps: { query [n, hidden] }.
---@param observation table  as of embed
---@return {query: Tensor}
function ActionModel:encode(observation)
  arguments.expect("ActionModel:encode", "observation", observation, "a table")
  return { query = self:decode(self:embed(observation)) }
end

--- Each row of x [n, width] as often as makes `rows` of them.
---@param x Tensor
---@param rows integer
---@return Tensor
function ActionModel.repeated(x, rows)
  arguments.expect("ActionModel.repeated", "x", x, "a tensor")
  arguments.expect("ActionModel.repeated", "rows", rows, "an integer >= 1")
  local m = rows // x.shape[1]
  if m == 1 then return x end
  return x:unsqueeze(1):expand(x.shape[1], m, x.shape[2]):reshape(rows, x.shape[2])
end

--- Clean actions by noised ones x [n * m, horizon, size] at times t [n * m], of which each m in a row belong to one of
-- the n conditions.
---@param x Tensor
---@param t Tensor
---@param condition {query: Tensor}
---@return Tensor
function ActionModel:denoise(x, t, condition)
  arguments.expect("ActionModel:denoise", "x", x, "a tensor")
  arguments.expect("ActionModel:denoise", "t", t, "a tensor")
  arguments.expect("ActionModel:denoise", "condition", condition, "a table")
  return self.action_head(x, t, ActionModel.repeated(condition.query, x.shape[1]))
end

return ActionModel
