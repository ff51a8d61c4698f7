--- Captions from a painter that learnt to read them: a picture is pressed through the few embeddings that a frozen
-- text-to-image model takes in the place of its text's, so that what these say is what the model paints, and a decoder
-- then learns from few pairs to put them in words. Zhang et al. 2025, "Vision-Language-Vision Auto-Encoder: Scalable
-- Knowledge Distillation from Diffusion Models".
--
--     local encoder = vlm.vlv.Encoder(tower, { channels = 96, places = 16, queries = 12, width = 64 })
--     vlm.vlv.reconstruct(encoder, objective, unet, latents, { steps = 300 })         -- stage 1: pictures only
--     local captioner = vlm.vlv.Captioner(encoder, decoder, 64)
--     vlm.vlv.caption(captioner, latents, tokens, { steps = 200 })                    -- stage 2: pairs
--     captioner:write(latents, { first = 0, last = 1, most = 12 })
local ty = require "tycho"
local arguments = require "tycho.arguments"

local nn = ty.nn
local M = {}

-- ---- picture to embeddings ----

--- A picture's embeddings: what a tower sees at its places, and learnt queries, in a transformer; what the queries have
-- become, through a linear layer, stands where a text's states stood.
---@class VLVEncoder: Module
---@field tower Module
local Encoder = nn.module "VLVEncoder"
M.Encoder = Encoder

--- tower: a module whose maps(x) gives [n, channels, rows, columns], with places = rows * columns; false where x is
-- that already, as of a tower that stays as it is and was asked once. options: channels, places, queries (77), width
-- (of the text's states), inner (width: of the transformer), layers (2), heads (4), start ([queries, width]: what is
-- added to the embeddings, and learns with them; where it is the states of an empty text, the painter paints as without
-- one at first, and nothing that it cannot read).
---@param tower Module|false
---@param options { channels: integer, places: integer, queries?: integer, width: integer, inner?: integer,
-- layers?: integer, heads?: integer, start?: Tensor }
function Encoder:init(tower, options)
  local who = "vlv.Encoder"
  if tower ~= false and not (nn.is_module(tower) and tower.maps) then
    arguments.fail("%s: tower: expected a module with maps() or false, got %s", who, arguments.describe(tower))
  end
  local integer = "an integer > 0"
  local o = arguments.read(who, options, { channels = 0, places = 0, queries = 77, width = 0, inner = arguments.none,
    layers = 2, heads = 4, start = arguments.none },
    { channels = integer, places = integer, queries = integer, width = integer,
    inner = integer, layers = integer, heads = integer, start = "a tensor" })
  if o.start and (o.start.ndim ~= 2 or o.start.shape[1] ~= o.queries or o.start.shape[2] ~= o.width) then
    arguments.fail("%s: start: expected [%d, %d], got %s", who, o.queries, o.width, arguments.describe(o.start))
  end
  local inner = o.inner or o.width
  self.tower, self.count = tower or nil, o.queries
  self.ready = nn.LayerNorm(o.channels)
  self.enter = nn.Linear(o.channels, inner)
  self.places = nn.Parameter(ty.randn(o.places, inner) * 0.1)
  self.queries = nn.Parameter(ty.randn(o.queries, inner) * 0.5)
  self.layers = nn.ModuleList {}
  for _ = 1, o.layers do
    self.layers:append(nn.TransformerEncoderLayer(inner, o.heads, { feedforward = 2 * inner, dropout = 0,
      activation = "gelu", norm_first = true }))
  end
  self.norm = nn.LayerNorm(inner)
  self.leave = nn.Linear(inner, o.width)
  if o.start then
    self.start = nn.Parameter(o.start:detach():clone():to "f32")
    ty.no_grad(function() self.leave.weight:mul_(0.3) end)
  end
end

--- x, as the tower takes it, [n, ...] to embeddings [n, queries, width].
---@param x Tensor
---@return Tensor
function Encoder:forward(x)
  local seen = self.enter(self.ready((self.tower and self.tower:maps(x) or x):flatten(2):transpose(1, 2))) + self.places
  local n, shape = x.shape[1], self.queries.shape
  local h = ty.concat({ self.queries:unsqueeze(0):expand(n, shape[1], shape[2]), seen }, 1)
  for _, layer in ipairs(self.layers) do h = layer(h) end
  local y = self.leave(self.norm(h:narrow(1, 0, self.count)))
  return self.start and y + self.start or y
end

--- The loss of stage 1: the painter's own training loss for x, with a picture's embeddings in the place of its text's.
---@param objective Objective  the painter's (tycho.diffusion.objective)
---@param network Module       the painter's, model(x, t, condition)
---@param embeddings Tensor    [n, queries, width]
---@param x Tensor             clean latents [n, ...]
---@param options? { told?: table, given?: table }  further entries of the condition; t and noise, as of Objective:loss
---@return Tensor
function M.loss(objective, network, embeddings, x, options)
  local who = "vlv.loss"
  arguments.expect(who, "objective", objective, "a table")
  arguments.expect(who, "network", network, "a module")
  arguments.expect(who, "embeddings", embeddings, "a tensor")
  arguments.expect(who, "x", x, "a tensor")
  local o = arguments.read(who, options, { told = {}, given = arguments.none }, { told = "a table", given = "a table" })
  local condition = { text = { embeddings = embeddings } }
  for key, value in pairs(o.told) do condition[key] = value end
  return objective:loss(network, x, condition, o.given)
end

local function falling(o)
  return ty.optim.cosine { steps = o.steps, warmup = math.max(1, o.steps // 20), final = 0.02 }
end

-- Both stages: loss_of(places) at every step. Returns the mean loss of the last tenth, and seconds.
local function learn(opt, count, o, device, loss_of)
  ty.manual_seed(o.seed)
  local next_places, began = ty.data.rounds(count, o.batch), ty.system.clock()
  local loss = ty.train.minimize(opt, o.steps, function()
    return loss_of(ty.tensor(next_places(), { dtype = "i64" }):to { device = device })
  end, o.watch)
  return loss, ty.system.clock() - began
end

local kinds = { steps = "an integer > 0", batch = "an integer > 0", watch = "a function" }

--- Stage 1: an encoder learns by what a frozen painter makes of its embeddings. latents: of pictures without captions
-- [m, ...]. options: seen (what the encoder takes of them, [m, ...]; the latents), steps (300), batch (32), lr (0.02:
-- of Muon, by which matrices learn; the rest learns by AdamW at a twentieth), decay (0.01), seed (0), told (see
-- loss()), watch(step, loss). The painter's weights get no gradient. Returns the mean loss of the last tenth of the
-- steps, and the seconds that it took.
---@param encoder Module
---@param objective Objective
---@param network Module
---@param latents Tensor
---@param options? table
---@return number loss
---@return number seconds
function M.reconstruct(encoder, objective, network, latents, options)
  local who = "vlv.reconstruct"
  arguments.expect(who, "encoder", encoder, "a module")
  arguments.expect(who, "objective", objective, "a table")
  arguments.expect(who, "network", network, "a module")
  arguments.expect(who, "latents", latents, "a tensor")
  local o = arguments.read(who, options, { steps = 300, batch = 32, lr = 0.02, decay = 0.01, seed = 0, told = {},
    seen = latents, watch = arguments.none }, { steps = kinds.steps, batch = kinds.batch, watch = kinds.watch,
    seen = "a tensor" })
  local wanted = {}
  for i, p in ipairs(network:parameters()) do wanted[i] = p.requires_grad end
  local training = network.training
  network:requires_grad_(false)
  network:eval()
  encoder:train()
  local inner, rest = {}, {}
  for name, p in encoder:named_parameters() do
    local inside = p.ndim >= 2 and name ~= "queries" and name ~= "places" and name ~= "start"
    table.insert(inside and inner or rest, p)
  end
  local opt = ty.optim.Muon({ { params = inner }, { params = rest, matrices = false } }, { lr = o.lr,
    weight_decay = o.decay, schedule = falling(o), clip_norm = 1, adam_rate = 0.05 })
  local ok, loss, seconds = pcall(learn, opt, latents.shape[1], o, latents.device, function(places)
    local x = latents:index_select(0, places)
    return M.loss(objective, network, encoder(o.seen:index_select(0, places)), x, { told = o.told })
  end)
  for i, p in ipairs(network:parameters()) do p:requires_grad_(wanted[i]) end
  network:train(training)
  encoder:eval()
  if not ok then error(loss, 0) end
  return loss, seconds
end

-- ---- embeddings to words ----

--- Writes captions of pictures: a small network maps an encoder's embeddings to a decoder's input, where they stand
-- before the caption's words.
---@class VLVCaptioner: Module
---@field encoder Module
---@field decoder Decoder
local Captioner = nn.module "VLVCaptioner"
M.Captioner = Captioner

--- encoder: x [n, ...] to [n, queries, width]; decoder: a language model of tycho.models that takes embeddings.
---@param encoder Module
---@param decoder Decoder
---@param width integer
function Captioner:init(encoder, decoder, width)
  local who = "vlv.Captioner"
  arguments.expect(who, "encoder", encoder, "a module")
  arguments.expect(who, "decoder", decoder, "a module")
  arguments.expect(who, "width", width, "an integer > 0")
  if not decoder.embed or not decoder.hidden then
    arguments.fail("%s: decoder: expected a language model, got %s", who, arguments.describe(decoder))
  end
  local hidden = decoder.config.hidden_size
  self.encoder, self.decoder = encoder, decoder
  self.map = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, hidden))
end

local function check(who, x, tokens, last)
  arguments.expect(who, "x", x, "a tensor")
  if x.ndim == 0 then arguments.fail("%s: x: expected [n, ...], got %s", who, arguments.describe(x)) end
  if tokens == nil then return end
  if not ty.is_tensor(tokens) or tokens.ndim ~= 2 or tokens.dtype ~= "i64" or tokens.shape[1] ~= x.shape[1]
    or tokens.shape[2] < (last ~= nil and 2 or 1) then
    arguments.fail("%s: tokens: expected i64 [%d, t] with t >= %d, got %s", who, x.shape[1], last ~= nil and 2 or 1,
      arguments.describe(tokens))
  end
  if last ~= nil then arguments.expect(who, "last", last, "an integer >= 0") end
end

-- Places for embeddings before tokens [n, t], and what the decoder gets of both.
local function before(self, x, tokens)
  local seen = self.map(self.encoder(x))
  local none = ty.zeros({ tokens.shape[1], seen.shape[2] }, { dtype = "i64", device = tokens.device })
  return ty.concat({ none, tokens }, 1), ty.concat({ seen, self.decoder:embed(tokens) }, 1)
end

--- Logits [n, t, vocabulary] for what follows each of the tokens i64 [n, t], of captions of x.
---@param x Tensor
---@param tokens Tensor
---@return Tensor
function Captioner:forward(x, tokens)
  check("VLVCaptioner", x, tokens or false)
  local all, embeddings = before(self, x, tokens)
  local t = tokens.shape[2]
  return self.decoder:head(self.decoder:hidden(all, { embeddings = embeddings, last = t }))
end

--- Mean cross entropy of captions: tokens i64 [n, t], from the first mark to `last`, which also fills rows up and is
-- learnt once.
---@param x Tensor
---@param tokens Tensor
---@param last integer
---@return Tensor
function Captioner:loss(x, tokens, last)
  check("VLVCaptioner:loss", x, tokens or false, last or false)
  local t = tokens.shape[2]
  local targets = tokens:narrow(1, 1, t - 1)
  local ended = tokens:narrow(1, 0, t - 1):eq(last)
  return nn.cross_entropy(self:forward(x, tokens:narrow(1, 0, t - 1)):flatten(0, 1),
    targets:masked_fill(ended, -100):flatten())
end

--- The likeliest words for pictures: i64 [n, most], beginning with `first`, and `last` after their end.
---@param x Tensor
---@param options { first: integer, last: integer, most: integer }
---@return Tensor
function Captioner:write(x, options)
  check("VLVCaptioner:write", x)
  local o = arguments.read("VLVCaptioner:write", options, { first = 0, last = 0, most = 16 },
    { first = "an integer >= 0", last = "an integer >= 0", most = "an integer >= 2" })
  return ty.no_grad(function()
    local token = ty.full({ x.shape[1], 1 }, o.first, { dtype = "i64", device = x.device })
    local cache, list, ended = self.decoder:cache(), { token }, token:ne(token)
    local all, embeddings = before(self, x, token)
    for _ = 2, o.most do
      local logits = self.decoder:head(self.decoder:hidden(all, { embeddings = embeddings, cache = cache, last = 1 }))
      token = logits:argmax(-1):masked_fill(ended, o.last)
      ended = ended:logical_or(token:eq(o.last))
      list[#list + 1], all, embeddings = token, token, nil
    end
    return ty.concat(list, 1)
  end)
end

--- Stage 2: a captioner learns from pairs. tokens: i64 [m, t] of the captions of latents [m, ...], as Captioner:loss()
-- takes them. options: last (the mark of the end), steps (200), batch (32), lr (1e-3), encoder (0.1: its rate over that
-- of the rest; 0: it stays as it is and needs no gradient from then on), decay (0.05), seed (0), watch. Returns the
-- mean loss of the last tenth of the steps, and seconds.
---@param captioner VLVCaptioner
---@param latents Tensor
---@param tokens Tensor
---@param options { last: integer, steps?: integer, batch?: integer, lr?: number, encoder?: number, decay?: number,
-- seed?: integer, watch?: function }
---@return number loss
---@return number seconds
function M.caption(captioner, latents, tokens, options)
  local who = "vlv.caption"
  arguments.expect(who, "captioner", captioner, "a module")
  arguments.expect(who, "latents", latents, "a tensor")
  arguments.expect(who, "tokens", tokens, "a tensor")
  local o = arguments.read(who, options, { last = 0, steps = 200, batch = 32, lr = 1e-3, encoder = 0.1, decay = 0.05,
    seed = 0, watch = arguments.none }, { last = "an integer >= 0", steps = kinds.steps, batch = kinds.batch,
    watch = kinds.watch, encoder = "a number >= 0" })
  local groups, own = { { params = {} } }, {}
  for _, p in ipairs(captioner.encoder:parameters()) do own[p] = true end
  for _, p in ipairs(captioner:parameters()) do
    if not own[p] then table.insert(groups[1].params, p) end
  end
  if o.encoder > 0 and next(own) then
    groups[2] = { params = captioner.encoder:parameters(), lr = o.lr * o.encoder }
  end
  captioner:train()
  if o.encoder == 0 then captioner.encoder:eval():requires_grad_(false) end
  local opt = ty.optim.AdamW(groups, { lr = o.lr, beta2 = 0.98, clip_norm = 1, weight_decay = o.decay,
    schedule = falling(o) })
  local loss, seconds = learn(opt, latents.shape[1], o, latents.device, function(places)
    return captioner:loss(latents:index_select(0, places), tokens:index_select(0, places), o.last)
  end)
  captioner:eval()
  return loss, seconds
end

return M
