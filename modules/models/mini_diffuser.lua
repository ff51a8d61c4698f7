--- The network of Mini-Diffuser: one condition (a picture, words, the arm's joints), many noised positions. Hu et al.
-- 2025, "Train a Multi-Task Diffusion Policy on RLBench-18 in One Day with One GPU", section 3: the condition is
-- encoded once and sees only itself; each sample sees itself and the condition, and no other sample; noise steps enter
-- by FiLM; a local query gathers the condition's features around the noised position.
--
--     local network = models.MiniDiffuser { words = 60 }
--     local condition = network:encode { images = images, words = words, states = states }
--     local noise = network:denoise(x, t, condition)         -- x [n * m, 2], t [n * m], m samples of each condition
local ty = require "tycho"
local arguments = require "tycho.arguments"

local nn = ty.nn

local M = {}

--- Attention in which the samples of a group share the keys of their condition: each sees these and itself.
-- q [n, heads, m, d] of m samples; k, v [n, heads, s, d] of the condition; own_k, own_v [n, heads, m, d] of the
-- samples. mask: bool [n, 1, 1, s], which keys of the condition are there. leak: every sample sees the others of its
-- group as well, which is what must not be. Equals attention over s + m keys under the mask (all | identity).
---@param q Tensor
---@param k Tensor
---@param v Tensor
---@param own_k Tensor
---@param own_v Tensor
---@param given? {mask?: Tensor, leak?: boolean}
---@return Tensor [n, heads, m, d]
function M.grouped_attention(q, k, v, own_k, own_v, given)
  local who = "grouped_attention"
  for name, x in pairs { q = q, k = k, v = v, own_k = own_k, own_v = own_v } do
    arguments.expect(who, name, x, "a tensor")
    if x.ndim ~= 4 then
      arguments.fail("%s: %s: expected [n, heads, positions, d], got %s", who, name, arguments.describe(x))
    end
  end
  local o = arguments.read(who, given, { mask = arguments.none, leak = false }, { mask = "a tensor" })
  local scale, keys = 1 / math.sqrt(q.shape[4]), k.shape[3]
  local scores = q:matmul(k:transpose(2, 3)) * scale
  if o.mask then scores = scores:masked_fill(o.mask:logical_not(), -1e30) end
  local own = o.leak and q:matmul(own_k:transpose(2, 3)) * scale or (q * own_k):sum({ 3 }, true) * scale
  local weights = ty.concat({ scores, own }, 3):softmax(-1)
  local seen, self = weights:narrow(3, 0, keys), weights:narrow(3, keys, own.shape[4])
  return seen:matmul(v) + (o.leak and self:matmul(own_v) or self * own_v)
end

-- One layer of the samples: attention to the condition and themselves, a feed-forward network; both modulated by time.
local Layer = nn.module "MiniDiffuserLayer"

function Layer:init(width, heads)
  local plain = { elementwise_affine = false }
  self.heads = heads
  self.norm1, self.norm2 = nn.LayerNorm(width, plain), nn.LayerNorm(width, plain)
  self.film = nn.Modulation(width, 4)
  self.qkv, self.kv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, 2 * width), nn.Linear(width, width)
  self.fc1, self.fc2 = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
end

-- Keys and values of a condition's tokens, by heads: what all samples share.
function Layer:remember(tokens)
  local k, v = self.kv(tokens):chunk(2, -1)
  return { k = nn.split_heads(k, self.heads), v = nn.split_heads(v, self.heads) }
end

-- h [n, m, width], time [n * m, width].
function Layer:forward(h, time, memory, mask, leak)
  local shape = h.shape
  local shift1, scale1, shift2, scale2 = self.film(time)
  local function modulated(norm, shift, scale) return norm(h) * (scale:reshape(shape) + 1) + shift:reshape(shape) end
  local q, k, v = self.qkv(modulated(self.norm1, shift1, scale1)):chunk(3, -1)
  local function by_heads(x) return nn.split_heads(x, self.heads) end
  h = h + self.proj(nn.join_heads(M.grouped_attention(by_heads(q), memory.k, memory.v, by_heads(k), by_heads(v),
    { mask = mask, leak = leak })))
  return h + self.fc2(self.fc1(modulated(self.norm2, shift2, scale2)):gelu())
end

-- One layer of the condition: words and joints attend to the places of the picture and to themselves. Places are keys
-- alone, which costs a fifth of attention among all.
local Reader = nn.module "MiniDiffuserReader"

function Reader:init(width, heads)
  self.heads = heads
  self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
  self.q, self.kv, self.proj = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(width, width)
  self.fc1, self.fc2 = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
end

function Reader:forward(h, places, mask)
  local y = self.norm1(h)
  local k, v = self.kv(ty.concat({ places, y }, 1)):chunk(2, -1)
  h = h + self.proj(nn.attention(self.q(y), k, v, { heads = self.heads, mask = mask }))
  return h + self.fc2(self.fc1(self.norm2(h)):gelu())
end

--- Mini-Diffuser's network for positions in the plane of a picture and a hand that opens or closes.
---@class MiniDiffuser: Module
local MiniDiffuser = nn.module "MiniDiffuser"
M.MiniDiffuser = MiniDiffuser

--- options: words (entries of the vocabulary; 0 is padding), states (4: numbers of the arm), size (64: pixels of a
-- side), patch (4: pixels of a side of a place of the map), channels (48, of the map), width (96), heads (4), layers
-- (2, of the condition), depth (2, of the samples), window (3: places of a side of the local query), phrase (16: words
-- at most), leak (false: samples see each other, to show what that does).
---@param options table
function MiniDiffuser:init(options)
  local none = arguments.none
  local o = arguments.read("MiniDiffuser", options, { words = none, states = 4, size = 64, patch = 4, channels = 48,
    width = 96, heads = 4, layers = 2, depth = 2, window = 3, phrase = 16, leak = false }, { words = "an integer >= 1",
    states = "an integer >= 1", size = "an integer >= 8", patch = "an integer >= 2", channels = "an integer >= 1",
    width = "an integer >= 2", heads = "an integer >= 1", layers = "an integer >= 0", depth = "an integer >= 1",
    window = "an integer >= 1", phrase = "an integer >= 1" })
  if not o.words then arguments.fail("MiniDiffuser: words: expected an integer >= 1, got nil") end
  if o.size % (2 * o.patch) ~= 0 then
    arguments.fail("MiniDiffuser: size: expected a multiple of 2 * patch, %d, got %d", 2 * o.patch, o.size)
  end
  local places, width = o.size // o.patch, o.width
  self.o, self.places = o, places
  self.stem = nn.Conv2d(3, o.channels, o.patch + 2, { stride = o.patch, padding = 1 })
  self.match, self.mix = nn.Linear(width, 2 * o.channels), nn.Conv2d(o.channels, o.channels, 1)
  self.down = nn.Conv2d(o.channels, width, 2, { stride = 2 })
  local function table_of(n) return nn.Parameter(ty.randn(1, n, width) * 0.5) end
  self.at_place, self.at_word = table_of(places * places // 4), table_of(o.phrase)
  self.word, self.state = nn.Embedding(o.words, width), nn.Linear(o.states, width)
  self.encoder = nn.ModuleList {}
  for _ = 1, o.layers do self.encoder:append(Reader(width, o.heads)) end
  self.norm, self.place_norm = nn.LayerNorm(width), nn.LayerNorm(width)
  self.frequencies = nn.Sinusoidal(width)
  self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
  self.position = nn.Linear(2 * 2 * 6 + 2, width)
  self.around = nn.Linear(o.window * o.window * o.channels, width)
  self.layers = nn.ModuleList {}
  for _ = 1, o.depth do self.layers:append(Layer(width, o.heads)) end
  self.last = nn.LayerNorm(width)
  self.noise, self.hand = nn.Linear(width, 2), nn.Linear(width, 1)
  nn.init.zeros(self.noise.weight)
  nn.init.zeros(self.noise.bias)
end

--- What samples are conditioned on, computed once for all of them. observation: images [n, 3, size, size] in [-1, 1],
-- words i64 [n, at most phrase] (0: none), states [n, numbers]. Returns { tokens, mask, map, memory (of each layer) }.
---@param observation {images: Tensor, words: Tensor, states: Tensor}
---@return table condition
function MiniDiffuser:encode(observation)
  arguments.expect("MiniDiffuser:encode", "observation", observation, "a table")
  for _, key in ipairs { "images", "words", "states" } do
    arguments.expect("MiniDiffuser:encode", "observation." .. key, observation[key], "a tensor")
  end
  local images, words = observation.images, observation.words
  if images.ndim ~= 4 or images.shape[3] ~= self.o.size or images.shape[4] ~= self.o.size then
    arguments.fail("MiniDiffuser:encode: observation.images: expected [n, 3, %d, %d], got %s", self.o.size, self.o.size,
      arguments.describe(images))
  end
  if words.ndim ~= 2 or words.shape[2] > self.o.phrase then
    arguments.fail("MiniDiffuser:encode: observation.words: expected [n, at most %d], got %s", self.o.phrase,
      arguments.describe(words))
  end
  local n, count = images.shape[1], words.shape[2]
  -- The words scale and shift the channels of the map, so that what they name stands out.
  local there = words:ne(0):to(images.dtype):unsqueeze(-1)
  local named = self.word(words)
  local scale, shift = self.match((named * there):sum { 1 } / there:sum({ 1 }):clamp(1)):chunk(2, 1)
  local map = self.stem(images):gelu()
  map = map + self.mix((map * (scale:reshape(n, -1, 1, 1) + 1) + shift:reshape(n, -1, 1, 1)):gelu())
  local places = self.place_norm(self.down(map):flatten(2):transpose(1, 2) + self.at_place)
  local phrase = named + self.at_word:narrow(1, 0, count)
  local tokens = ty.concat({ self.state(observation.states):unsqueeze(1), phrase }, 1)
  local mask = ty.concat({ ty.ones({ n, 1 + places.shape[2] }, { dtype = "bool", device = images.device }),
    words:ne(0) }, 1):reshape(n, 1, 1, -1)
  for _, layer in ipairs(self.encoder) do tokens = layer(tokens, places, mask) end
  tokens = ty.concat({ places, self.norm(tokens) }, 1)
  local memory = {}
  for i, layer in ipairs(self.layers) do memory[i] = layer:remember(tokens) end
  return { tokens = tokens, mask = mask, map = map, memory = memory }
end

-- Features of the map around positions x [n, m, 2], (x, y) from -1 to 1, y down: [n, m, window^2 * channels].
function MiniDiffuser:gather(x, map)
  arguments.expect("MiniDiffuser:gather", "x", x, "a tensor")
  arguments.expect("MiniDiffuser:gather", "map", map, "a tensor")
  if x.ndim ~= 3 or map.ndim ~= 4 then
    arguments.fail("MiniDiffuser:gather: expected x [n, m, 2] and a map [n, c, h, w], got %s and %s",
      arguments.describe(x), arguments.describe(map))
  end
  local n, m, w = x.shape[1], x.shape[2], self.o.window
  local side = (ty.arange(w, { dtype = x.dtype, device = x.device }) - (w - 1) / 2) * (2 / self.places)
  local columns, rows = side:reshape(1, w):expand(w, w), side:reshape(w, 1):expand(w, w)
  local offsets = ty.stack({ columns, rows }, 2):reshape(1, 1, w * w, 2)
  local grid = x:unsqueeze(2) + offsets
  return ty.grid_sample(map, grid, "bilinear", "border"):permute(0, 2, 3, 1):reshape(n, m, -1)
end

-- Hidden states of samples x [n * m, 2] with times' embeddings [n * m, width].
local function samples(self, x, time, condition)
  if type(condition) ~= "table" or not ty.is_tensor(condition.tokens) then
    arguments.fail("MiniDiffuser: condition: expected what MiniDiffuser:encode() gives, got %s",
      arguments.describe(condition))
  end
  local n = condition.tokens.shape[1]
  if x.ndim ~= 2 or x.shape[2] ~= 2 or x.shape[1] % n ~= 0 then
    arguments.fail("MiniDiffuser: x: expected [a multiple of %d, 2], got %s", n, arguments.describe(x))
  end
  x = x:reshape(n, -1, 2)
  local m = x.shape[2]
  local waves = {}
  for i = 0, 5 do
    waves[2 * i + 1], waves[2 * i + 2] = (x * (math.pi / 2 * 2 ^ i)):sin(), (x * (math.pi / 2 * 2 ^ i)):cos()
  end
  waves[#waves + 1] = x
  local h = self.position(ty.concat(waves, 2)) + self.around(self:gather(x, condition.map))
  h = h + time:reshape(n, m, -1)
  for i, layer in ipairs(self.layers) do h = layer(h, time, condition.memory[i], condition.mask, self.o.leak) end
  return self.last(h):reshape(n * m, -1)
end

--- The noise in samples x [n * m, 2] at times t [n * m], of which each m belong to one of the n conditions, in order.
---@param x Tensor
---@param t Tensor
---@param condition table  of encode
---@return Tensor [n * m, 2]
function MiniDiffuser:denoise(x, t, condition)
  arguments.expect("MiniDiffuser:denoise", "x", x, "a tensor")
  arguments.expect("MiniDiffuser:denoise", "t", t, "a tensor")
  arguments.expect("MiniDiffuser:denoise", "condition", condition, "a table")
  return self.noise(samples(self, x, self.time(self.frequencies(t):to(x.dtype)), condition))
end

--- Logits [n * m] that the hand is closed at clean positions x [n * m, 2]: what is not diffused is classified there.
---@param x Tensor
---@param condition table
---@return Tensor
function MiniDiffuser:classify(x, condition)
  arguments.expect("MiniDiffuser:classify", "x", x, "a tensor")
  arguments.expect("MiniDiffuser:classify", "condition", condition, "a table")
  local t = ty.zeros({ x.shape[1] }, { device = x.device })
  return self.hand(samples(self, x, self.time(self.frequencies(t):to(x.dtype)), condition)):squeeze(-1)
end

return M
