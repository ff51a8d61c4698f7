--- Networks of visuomotor policies: features of two frozen encoders, semantic and geometric, fused by cross-attention
-- and compressed by convolutions, as the condition of a head that denoises chunks of actions. Ni et al. 2025, "VO-DP:
-- Semantic-Geometric Adaptive Diffusion Policy for Vision-Only Robotic Manipulation". Which side asks the paper's
-- abstract does not say: here the geometric features ask the semantic ones, and keep themselves as the residual.
--
--     local network = models.FusedPolicy { semantic = 128, geometric = 64, words = 40, actions = 4, horizon = 8 }
--     local condition = network:encode { semantic = s, geometric = g, words = words, states = states }
--     local y = network:denoise(x, t, condition)              -- x [n * m, horizon, actions]
local ty = require "tycho"
local arguments = require "tycho.arguments"

local nn, none = ty.nn, arguments.none

local M = {}

local ways = { cross = true, concat = true, semantic = true, geometric = true }

--- Two maps of features of the same places as one: by cross-attention (the geometric ask the semantic ones), side by
-- side, or one alone. The fusion's last layer begins at zero, so that it begins as the geometric features alone.
---@class Fusion: Module
local Fusion = nn.module "Fusion"
M.Fusion = Fusion

--- options: semantic, geometric (widths of the features), width (64), heads (4), way ("cross", "concat", "semantic",
-- "geometric").
---@param options table
function Fusion:init(options)
  local o = arguments.read("Fusion", options, { semantic = none, geometric = none, width = 64, heads = 4,
    way = "cross" }, { semantic = "an integer >= 1", geometric = "an integer >= 1", width = "an integer >= 1",
    heads = "an integer >= 1" })
  for _, name in ipairs { "semantic", "geometric" } do
    if not o[name] then arguments.fail("Fusion: %s: expected an integer >= 1, got nil", name) end
  end
  if not ways[o.way] then
    arguments.fail('Fusion: way: expected "cross", "concat", "semantic" or "geometric", got %s',
      arguments.describe(o.way))
  end
  local width = o.width
  self.way, self.heads = o.way, o.heads
  if o.way ~= "geometric" then self.semantic = nn.Linear(o.semantic, width) end
  if o.way ~= "semantic" then self.geometric = nn.Linear(o.geometric, width) end
  if o.way == "concat" then
    self.join = nn.Linear(2 * width, width)
  elseif o.way == "cross" then
    self.norm, self.norm_semantic = nn.LayerNorm(width), nn.LayerNorm(width)
    self.q, self.kv, self.proj = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(width, width)
    nn.init.zeros(self.proj.weight)
    nn.init.zeros(self.proj.bias)
  end
end

--- semantic [n, places, width of these], geometric [n, places, width of those] to [n, places, width].
---@param semantic Tensor
---@param geometric Tensor
---@return Tensor
function Fusion:forward(semantic, geometric)
  for name, x in pairs { semantic = semantic, geometric = geometric } do
    arguments.expect("Fusion", name, x, "a tensor")
    if x.ndim ~= 3 then
      arguments.fail("Fusion: %s: expected [n, places, width], got %s", name, arguments.describe(x))
    end
  end
  if self.way == "semantic" then return self.semantic(semantic) end
  local g = self.geometric(geometric)
  if self.way == "geometric" then return g end
  local s = self.semantic(semantic)
  if self.way == "concat" then return self.join(ty.concat({ s, g }, 2)) end
  local k, v = self.kv(self.norm_semantic(s)):chunk(2, -1)
  return g + self.proj(nn.attention(self.q(self.norm(g)), k, v, { heads = self.heads }))
end

-- A residual layer of the head, modulated by time and condition (FiLM).
local HeadLayer = nn.module "PolicyHeadLayer"

function HeadLayer:init(width)
  self.norm, self.film = nn.LayerNorm(width, { elementwise_affine = false }), nn.Modulation(width, 2)
  self.fc1, self.fc2 = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
end

function HeadLayer:forward(h, c) return h + self.fc2(self.fc1(nn.modulate(self.norm(h), self.film(c))):gelu()) end

-- A residual convolution over the map of a picture, modulated by the words (FiLM: Perez et al. 2018), so that what is
-- kept of the picture is what the words are about. Brohan et al. 2022, "RT-1", have it so.
local MapLayer = nn.module "PolicyMapLayer"

function MapLayer:init(width, condition)
  self.norm, self.conv = nn.GroupNorm(width % 8 == 0 and 8 or 1, width), nn.Conv2d(width, width, 3, { padding = 1 })
  self.film = nn.Modulation(condition, 2, { outputs = width })
end

function MapLayer:forward(h, c)
  local shift, scale = self.film(c)
  return h + self.conv((self.norm(h) * (scale:unsqueeze(2):unsqueeze(3) + 1) + shift:unsqueeze(2):unsqueeze(3)):gelu())
end

-- What both policies have: words, what they leave of the map of a picture, joints, and the head that denoises chunks of
-- actions as one vector.
local Policy = nn.module "ChunkPolicyNetwork"

local shared = { words = none, states = 8, actions = 4, horizon = 8, phrase = 14, condition = 128, head = 192,
  depth = 3, layers = 2, compressed = 16 }
local shared_kinds = { words = "an integer >= 1", states = "an integer >= 1", actions = "an integer >= 1",
  horizon = "an integer >= 1", phrase = "an integer >= 1", condition = "an integer >= 1", head = "an integer >= 1",
  depth = "an integer >= 1", layers = "an integer >= 0", compressed = "an integer >= 1" }

-- Reads the options that are shared, and those of `more`.
local function read(who, options, more, kinds)
  local defaults, all = {}, {}
  for _, part in ipairs { shared, more } do for key, value in pairs(part) do defaults[key] = value end end
  for _, part in ipairs { shared_kinds, kinds } do for key, value in pairs(part) do all[key] = value end end
  local o = arguments.read(who, options, defaults, all)
  if not o.words then arguments.fail("%s: words: expected an integer >= 1, got nil", who) end
  return o
end

-- width, side: of the map of the picture.
local function build(self, o, width, side)
  self.o = o
  self.word, self.phrase = nn.Embedding(o.words, 16), nn.Linear(16 * o.phrase, o.condition)
  self.at, self.maps = nn.Parameter(ty.randn(1, width, side, side) * 0.1), nn.ModuleList {}
  for _ = 1, o.layers do self.maps:append(MapLayer(width, o.condition)) end
  self.compress = nn.Conv2d(width, o.compressed, 3, { stride = 2, padding = 1 })
  local half = (side + 1) // 2
  self.join = nn.Linear(o.compressed * half * half + o.condition + o.states, o.condition)
  self.out = nn.Linear(o.condition, o.condition)
  self.inputs, self.frequencies = nn.Linear(o.horizon * o.actions, o.head), nn.Sinusoidal(64)
  self.time, self.given = nn.Linear(64, o.head), nn.Linear(o.condition, o.head)
  self.layers = nn.ModuleList {}
  for _ = 1, o.depth do self.layers:append(HeadLayer(o.head)) end
  self.norm, self.last = nn.LayerNorm(o.head), nn.Linear(o.head, o.horizon * o.actions)
  nn.init.zeros(self.last.weight)
  nn.init.zeros(self.last.bias)
end

-- The condition [n, condition] of the map of a picture [n, width, side, side], words i64 [n, phrase] and states [n,
-- states].
local function conditioned(self, map, observation)
  local who = getmetatable(self).__name .. ":encode"
  for _, key in ipairs { "words", "states" } do
    arguments.expect(who, "observation." .. key, observation[key], "a tensor")
  end
  local words = observation.words
  if words.ndim ~= 2 or words.shape[2] ~= self.o.phrase then
    arguments.fail("%s: observation.words: expected [n, %d], got %s", who, self.o.phrase, arguments.describe(words))
  end
  local phrase, h = self.phrase(self.word(words):flatten(1)):gelu(), map + self.at
  for _, layer in ipairs(self.maps) do h = layer(h, phrase) end
  h = self.compress(h:gelu()):gelu():flatten(1)
  return self.out(self.join(ty.concat({ h, phrase, observation.states }, 1)):gelu())
end

--- What the process predicts of chunks x [n * m, horizon, actions] at times t [n * m], of which each m in a row belong
-- to one of the n conditions.
---@param x Tensor
---@param t Tensor
---@param condition Tensor  of encode
---@return Tensor
function Policy:denoise(x, t, condition)
  local who = getmetatable(self).__name .. ":denoise"
  arguments.expect(who, "x", x, "a tensor")
  arguments.expect(who, "t", t, "a tensor")
  arguments.expect(who, "condition", condition, "a tensor")
  local n = condition.shape[1]
  if x.ndim ~= 3 or x.shape[1] % n ~= 0 then
    arguments.fail("%s: x: expected [a multiple of %d, %d, %d], got %s", who, n, self.o.horizon, self.o.actions,
      arguments.describe(x))
  end
  local m = x.shape[1] // n
  local c = self.given(condition):unsqueeze(1):expand(n, m, self.o.head):reshape(n * m, -1)
    + self.time(self.frequencies(t):to(x.dtype))
  local h = self.inputs(x:flatten(1)) + c
  for _, layer in ipairs(self.layers) do h = layer(h, c) end
  return self.last(self.norm(h)):reshape(x.shape)
end

--- A policy that sees what two frozen encoders say of the picture: fused, and compressed by convolutions.
---@class FusedPolicy: Module
local FusedPolicy = nn.module("FusedPolicy", Policy)
M.FusedPolicy = FusedPolicy

--- options: those of Fusion; places (8: of a side); words (entries of the vocabulary), phrase (14: words of a task),
-- states (8), actions (4), horizon (8: actions of a chunk), layers (2: over the map, modulated by the words),
-- compressed (16: channels after these), condition (128), head (192: width), depth (3).
---@param options table
function FusedPolicy:init(options)
  local o = read("FusedPolicy", options, { semantic = none, geometric = none, width = 64, heads = 4, way = "cross",
    places = 8 }, { semantic = "an integer >= 1", geometric = "an integer >= 1", width = "an integer >= 1",
    heads = "an integer >= 1", places = "an integer >= 4" })
  self.fusion = Fusion { semantic = o.semantic, geometric = o.geometric, width = o.width, heads = o.heads, way = o.way }
  build(self, o, o.width, o.places)
end

--- The condition of an observation: semantic [n, places^2, width], geometric [n, places^2, width], words, states.
---@param observation table
---@return Tensor
function FusedPolicy:encode(observation)
  arguments.expect("FusedPolicy:encode", "observation", observation, "a table")
  local map, places = self.fusion(observation.semantic, observation.geometric):transpose(1, 2), self.o.places
  if map.shape[3] ~= places * places then
    arguments.fail("FusedPolicy:encode: observation: expected features of %d places, got %d", places * places,
      map.shape[3])
  end
  return conditioned(self, map:reshape(map.shape[1], -1, places, places), observation)
end

--- A policy that sees pixels, by convolutions that are trained with it: the baseline, of Chi et al. 2023.
---@class PixelPolicy: Module
local PixelPolicy = nn.module("PixelPolicy", Policy)
M.PixelPolicy = PixelPolicy

--- options: channels ({ 24, 48, 64 }: of convolutions with stride 2, from pixels to 8 x 8 places of a picture of 64),
-- size (64), and words ... depth as of FusedPolicy.
---@param options table
function PixelPolicy:init(options)
  local o = read("PixelPolicy", options, { channels = { 24, 48, 64 }, size = 64 }, { channels = "a list of integers",
    size = "an integer >= 16" })
  self.convs = nn.ModuleList {}
  local before, size = 3, o.size
  for _, channels in ipairs(o.channels) do
    self.convs:append(nn.Conv2d(before, channels, 3, { stride = 2, padding = 1 }))
    self.convs:append(nn.GroupNorm(8, channels))
    before, size = channels, (size + 1) // 2
  end
  build(self, o, before, size)
end

--- The condition of an observation: images [n, 3, size, size] in [-1, 1], words, states.
---@param observation table
---@return Tensor
function PixelPolicy:encode(observation)
  arguments.expect("PixelPolicy:encode", "observation", observation, "a table")
  arguments.expect("PixelPolicy:encode", "observation.images", observation.images, "a tensor")
  local h, size = observation.images, self.o.size
  if h.ndim ~= 4 or h.shape[2] ~= 3 or h.shape[3] ~= size or h.shape[4] ~= size then
    arguments.fail("PixelPolicy:encode: observation.images: expected [n, 3, %d, %d], got %s", size, size,
      arguments.describe(h))
  end
  for i = 1, #self.convs, 2 do h = self.convs[i + 1](self.convs[i](h)):gelu() end
  return conditioned(self, h, observation)
end

-- ---- geometry ----

--- A small network of the geometry of a picture of 64 x 64 pixels, a stand-in for VGGT: for each of 8 x 8 places what
-- is in front there, and where key points are. Its last map is the geometric feature.
---@class GeometryNet: Module
local GeometryNet = nn.module "GeometryNet"
M.GeometryNet = GeometryNet

--- options: layers (5: kinds of what is in front, by depth), points (3: key points), width (64: of the features).
---@param options? table
function GeometryNet:init(options)
  local o = arguments.read("GeometryNet", options, { layers = 5, points = 3, width = 64 }, { layers = "an integer >= 2",
    points = "an integer >= 1", width = "an integer >= 8" })
  self.conv1 = nn.Conv2d(3, 24, 3, { stride = 2, padding = 1 })
  self.conv2 = nn.Conv2d(24, 48, 3, { stride = 2, padding = 1 })
  self.conv3 = nn.Conv2d(48, o.width, 3, { stride = 2, padding = 1 })
  self.conv4 = nn.Conv2d(o.width, o.width, 3, { padding = 1 })
  self.front, self.points = nn.Conv2d(o.width, o.layers, 1), nn.Linear(64 * 16, 2 * o.points)
  self.squeeze = nn.Conv2d(o.width, 16, 1)
end

--- Features [n, 64, width] of pictures [n, 3, 64, 64] in [-1, 1].
---@param images Tensor
---@return Tensor
function GeometryNet:features(images)
  arguments.expect("GeometryNet:features", "images", images, "a tensor")
  if images.ndim ~= 4 or images.shape[3] ~= 64 or images.shape[4] ~= 64 then
    arguments.fail("GeometryNet:features: images: expected [n, 3, 64, 64], got %s", arguments.describe(images))
  end
  return self:map(images):flatten(2):transpose(1, 2)
end

function GeometryNet:map(images)
  local h = self.conv2(self.conv1(images):gelu()):gelu()
  h = self.conv3(h):gelu()
  return h + self.conv4(h):gelu()
end

--- Logits [n, layers, 8, 8] of what is in front, and key points [n, 2 * points] in [-1, 1].
---@param images Tensor
---@return Tensor front
---@return Tensor points
function GeometryNet:forward(images)
  arguments.expect("GeometryNet", "images", images, "a tensor")
  local map = self:map(images)
  return self.front(map), self.points(self.squeeze(map):gelu():flatten(1))
end

return M
