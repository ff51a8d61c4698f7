--- Attention becomes a state space model: Liao et al. 2025, "Multimodal Mamba: Decoder-only Multimodal State Space
-- Model via Quadratic to Linear Distillation" (mmMamba, arXiv 2502.13145), and its reference code. A layer of Mamba-2
-- (Dao and Gu 2024, "Transformers are SSMs") is seeded with the weights of a decoder's attention,
--
--     C = silu(conv(W_q x))   B = silu(conv(W_k x))   v = silu(conv(W_v x))      W_q, W_k, W_v, W_o of the attention
--     S_t = exp(-exp(a) d_t) S_(t-1) + d_t B_t' v_t   y_t = C_t S_t              d_t = softplus(W_d x_t + b_d)
--     out = W_o (norm(y) silu(W_g x))                                             norm: RMS, of each head
--
-- without rotary positions, and learns from the model that it came from in three stages: what is new alone and then the
-- whole layer, by the distance to what attention gives on the teacher's own inputs; then end to end, by the divergence
-- of the words. A state has the same size however many tokens came, and a token costs as much. Layers may keep their
-- attention (a hybrid). The convolution is over two tokens and begins as the identity, d between 0.001 and 0.1.
local ty = require "tycho"
local arguments = require "tycho.arguments"

local nn = ty.nn
local layers_of_models = require "tycho.models.layers"
local M = {}

-- What a layer has besides the weights of its attention. width: of all heads of queries, kv of keys.
local Mixer = nn.module "Mamba2"

function Mixer:init(hidden, heads, width, kv, eps)
  local channels = heads * width + 2 * kv * width
  local weight = ty.zeros(2, channels)
  weight:select(0, 1):fill_(1)
  self.conv_weight, self.conv_bias = nn.Parameter(weight), nn.Parameter(ty.zeros(channels))
  self.dt_proj = nn.Linear(hidden, heads, { bias = false })
  nn.init.zeros(self.dt_proj.weight)
  -- softplus(dt_bias) is spread evenly between the logarithms of 0.001 and 0.1.
  local dt = (ty.rand(heads) * math.log(0.1 / 0.001) + math.log(0.001)):exp()
  self.dt_bias = nn.Parameter(dt + (-(-dt):expm1()):log())
  self.A_log = nn.Parameter(ty.ones(heads))
  self.g_proj = nn.Linear(hidden, heads * width, { bias = false })
  nn.init.xavier_uniform(self.g_proj.weight, 2 ^ -2.5)
  self.g_norm = nn.RMSNorm(width, { eps = eps })
end

-- ---- sequences ----

-- How the tokens of a mask [n, 1, t, t] lie (tycho.vlm.packing.turns): all rows begin with as many tokens that all of
-- their turns share. begins: where the turns begin among the other tokens of all rows, one row after the other; row: of
-- each turn; before i64 [n, t]: where the token before each one is, t for none.
local function turns_of(mask)
  local shape = mask.shape
  local n, t = shape[1], shape[3]
  local seen = mask:squeeze(1)
  local common = seen:to("u8"):all { 1 }:to("i64"):sum { 1 }:tolist()
  local shared = common[1]
  local follows = t > 1 and seen:diagonal(-1, 1, 2):to("u8"):tolist() or {}
  local begins, row, before = {}, {}, {}
  for i = 1, n do
    if common[i] ~= shared then
      arguments.fail("distill.mamba: mask: expected rows that share as many first tokens, got %d and %d", shared,
        common[i])
    end
    before[i] = {}
    for j = 1, t do
      local first = j == 1 or j > shared and (j == shared + 1 or follows[i][j - 1] == 0)
      if first and j > shared then
        begins[#begins + 1], row[#row + 1] = (i - 1) * (t - shared) + j - shared - 1, i - 1
      end
      before[i][j] = not first and j - 2 or j > shared and shared > 0 and shared - 1 or t
    end
  end
  begins[#begins + 1] = n * (t - shared)
  local function integers(list) return ty.keep(ty.tensor(list, { dtype = "i64" }):to { device = mask.device }) end
  return { shared = shared, begins = integers(begins), row = integers(row), before = integers(before) }
end

-- The token before each of u [b, t, channels], zeros where there is none.
local function before(u, at, tail)
  local shape = u.shape
  local b, t, channels = shape[1], shape[2], shape[3]
  local none = tail or ty.zeros({ b, 1, channels }, { dtype = u.dtype, device = u.device })
  if at.turns then
    return ty.concat({ u, none }, 1):gather(1, at.turns.before:unsqueeze(-1):expand(b, t, channels))
  end
  local shifted = t > 1 and ty.concat({ none, u:narrow(1, 0, t - 1) }, 1) or none
  if at.starts then shifted = shifted:masked_fill(at.starts, 0) end
  return shifted
end

-- y [b, h, t, d] of C, B, v [b, h, t, d] and the logarithms of the gates g [b, h, t, 1], and the last state.
local function scan(c, b, v, g, at, state)
  local turns = at.turns
  if not turns then return ty.gated_linear_attention(c, b, v, g, state, 1, at.cu_seqlens) end
  local shape, s = c.shape, turns.shared
  local n, h, t = shape[1], shape[2], shape[3]
  local first, known
  if s > 0 then
    local function part(x) return x:narrow(2, 0, s) end
    first, state = ty.gated_linear_attention(part(c), part(b), part(v), part(g), nil, 1)
    known = state:index_select(0, turns.row)
    if s == t then return first, state end
  end
  -- The turns as packed sequences, each of which goes on from the state of its row.
  local function packed(x)
    return x:narrow(2, s, t - s):transpose(0, 1):reshape(1, h, n * (t - s), x.shape[4])
  end
  local rest = ty.gated_linear_attention(packed(c), packed(b), packed(v), packed(g), known, 1, turns.begins)
  rest = rest:reshape(h, n, t - s, v.shape[4]):transpose(0, 1)
  return first and ty.concat({ first, rest }, 2) or rest
end

--- C, B and v before the convolution, [b, t, heads * width] each, of a layer's input [b, t, hidden]: what attention
-- calls queries, keys and values.
---@param attention Module
---@param x Tensor
---@return Tensor
---@return Tensor
---@return Tensor
function M.project(attention, x)
  local who = "distill.mamba.project"
  arguments.expect(who, "attention", attention, "a module")
  arguments.expect(who, "x", x, "a tensor")
  if not attention.q_proj then
    arguments.fail("%s: attention: expected one with q_proj, k_proj and v_proj, got %s", who,
      arguments.describe(attention))
  end
  return attention.q_proj(x), attention.k_proj(x), attention.v_proj(x)
end

local function heads_of(x, heads, group)
  x = nn.split_heads(x, heads)
  return group > 1 and x:repeat_interleave(group, 1) or x
end

local mamba = nn.surgery.wrapper { name = "Mamba", field = "_mamba", fields = { "mixer" },
  describe = function() return "a state space model" end,
  forward = function()
    return function(self, x, at)
      if at.bias then arguments.fail("distill.mamba: expected a mask at most, got biased scores") end
      local mixer, cache, padding = self.mixer, at.cache, nil
      local held = cache and cache[at.layer]
      if at.mask and at.mask.shape[3] > 1 then
        at.turns = at.turns or turns_of(at.mask)
      elseif at.mask then -- padding: its columns are those of all tokens so far
        padding = layers_of_models.tail(at.mask, 3, x.shape[2]):reshape(x.shape[1], x.shape[2], 1):logical_not()
      elseif at.cu_seqlens and not at.starts then
        local is_start = ty.zeros({ x.shape[2] + 1 }, { dtype = "u8", device = x.device })
        at.starts = is_start:index_fill(0, at.cu_seqlens, 1):narrow(0, 0, x.shape[2]):to("bool"):reshape(1, -1, 1)
      end
      local q, k, v = M.project(self, x)
      local sizes = { q.shape[3], k.shape[3], v.shape[3] }
      local u = ty.concat({ q, k, v }, 2)
      if padding then u = u:masked_fill(padding, 0) end
      local mixed = ty.silu(before(u, at, held and held.tail) * mixer.conv_weight:select(0, 0)
        + u * mixer.conv_weight:select(0, 1) + mixer.conv_bias)
      local group = self.heads // self.kv_heads
      local c = nn.split_heads(mixed:narrow(2, 0, sizes[1]), self.heads)
      local b = heads_of(mixed:narrow(2, sizes[1], sizes[2]), self.kv_heads, group)
      v = heads_of(mixed:narrow(2, sizes[1] + sizes[2], sizes[3]), self.kv_heads, group)
      local dt = ty.softplus(mixer.dt_proj(x) + mixer.dt_bias) -- [b, t, heads]
      if padding then dt = dt:masked_fill(padding, 0) end -- nothing is forgotten, nothing added
      dt = dt:transpose(1, 2):unsqueeze(-1)
      local g = -(mixer.A_log:exp():reshape(1, -1, 1, 1) * dt)
      local y, state = scan(c, b, v * dt, g, at, held and held.state)
      if cache then
        cache:skip(at.layer, x.shape[2]) -- no keys and values are kept
        held.state, held.tail = ty.unscoped(ty.clone, state:detach()),
          ty.unscoped(ty.clone, u:narrow(1, x.shape[2] - 1, 1):detach())
      end
      y = layers_of_models.wanted(nn.join_heads(mixer.g_norm(y)), at)
      return self.o_proj(y * ty.silu(mixer.g_proj(layers_of_models.wanted(x, at))))
    end
  end }

-- ---- students ----

local function decoder_of(who, model)
  arguments.expect(who, "model", model, "a module")
  local decoder = model.language_model or model
  local first = decoder.model and decoder.model.layers and decoder.model.layers[1]
  if not first or not first.self_attn or not first.self_attn.q_proj or first.self_attn.q_norm then
    arguments.fail("%s: model: expected a decoder whose attention has q_proj, k_proj and v_proj without norms, got %s",
      who, arguments.describe(model))
  end
  return decoder
end

--- A copy of a decoder, or of a Llava around one, whose layers have a state in the place of attention. options: keep
-- (numbers of the layers that keep attention, from 1; none), seeded (true; false: W_q, W_k and W_v are drawn anew) and
-- seed (0: of what is new).
---@param model LanguageModel
---@param options? { keep?: integer[], seeded?: boolean, seed?: integer }
---@return LanguageModel student
function M.student(model, options)
  local who = "distill.mamba.student"
  decoder_of(who, model)
  local o = arguments.read(who, options, { keep = {}, seeded = true, seed = 0 }, { keep = "a list of integers",
    seed = "an integer" })
  local student, kept = model:clone():requires_grad_(true), {}
  local layers = decoder_of(who, student).model.layers
  for _, layer in ipairs(o.keep) do
    if not layers[layer] then
      arguments.fail("%s: keep: expected integers in [1, %d], got %d", who, #layers, layer)
    end
    kept[layer] = true
  end
  ty.data.with_seed(o.seed, function()
    for i, layer in ipairs(layers) do
      if not kept[i] then
        local attention = layer.self_attn
        local weight = attention.q_proj.weight
        local width = weight.shape[1] // attention.heads
        attention.mixer = Mixer(weight.shape[2], attention.heads, width, attention.kv_heads, 1e-5)
          :to { device = weight.device, dtype = weight.dtype }
        for _, name in ipairs(o.seeded and {} or { "q_proj", "k_proj", "v_proj" }) do
          nn.init.normal(attention[name].weight, 0, weight.shape[2] ^ -0.5)
        end
        mamba:wrap(attention, {})
      end
    end
  end)
  return student
end

--- Makes the layers of a student attention again, by the weights that they have now.
---@param student LanguageModel
function M.remove(student)
  local who = "distill.mamba.remove"
  decoder_of(who, student)
  for _, layer in ipairs(mamba:wrapped(who, student)) do mamba:unwrap(layer.module) end
end

-- Which parameters learn in a stage.
local function learners(student, stage)
  local list = {}
  for name, p in (student.language_model or student):named_parameters() do
    local new, own = name:find(".mixer.", 1, true), name:find(".self_attn.", 1, true)
    if stage == 3 or new or stage == 2 and own then list[#list + 1] = p end
  end
  return list
end

--- The loss of the first two stages: of each layer with a state, the squared distance to what the teacher's attention
-- gives on the input that it had in the teacher, over the mean square of that; their mean. tokens, options: of the
-- teacher's hidden().
---@param teacher LanguageModel
---@param student LanguageModel
---@param tokens Tensor
---@param options? table
---@return Tensor loss
function M.alignment(teacher, student, tokens, options)
  local who = "distill.mamba.alignment"
  local theirs, ours = decoder_of(who, teacher).model.layers, decoder_of(who, student).model.layers
  arguments.expect(who, "tokens", tokens, "a tensor")
  arguments.expect(who, "options", options, "a table or nil")
  local seen, removers = {}, {}
  for i, layer in ipairs(theirs) do
    if ours[i].self_attn.mixer then
      removers[#removers + 1] = layer.self_attn:register_forward_hook(function(_, output, x, at)
        local own = {}
        for key, value in pairs(at) do own[key] = value end
        seen[#seen + 1] = { layer = i, x = x, at = own, y = output[1] }
      end)
    end
  end
  local ok, message = pcall(ty.no_grad, function() return teacher:hidden(tokens, options) end)
  for _, remove in ipairs(removers) do remove() end
  if not ok then error(message, 0) end
  local sum, turns = 0, nil
  for _, one in ipairs(seen) do
    one.at.turns = turns
    local y = ours[one.layer].self_attn(one.x, one.at)
    turns = one.at.turns
    sum = sum + (y - one.y):square():mean() / one.y:square():mean()
  end
  return sum / #seen
end

--- The loss of the third stage: the mean divergence KL(teacher | student) of rows of logits [n, vocabulary].
---@param reference Tensor
---@param logits Tensor
---@return Tensor loss
function M.divergence(reference, logits)
  local who = "distill.mamba.divergence"
  arguments.expect(who, "reference", reference, "a tensor")
  arguments.expect(who, "logits", logits, "a tensor")
  local p = reference:detach():to("f32"):log_softmax(-1)
  return (p:exp() * (p - logits:to("f32"):log_softmax(-1))):sum(-1):mean()
end

--- A teacher's logits, without gradients, at some places of the flattened tokens: [m, vocabulary].
---@param teacher LanguageModel
---@param tokens Tensor
---@param options table  of hidden()
---@param places Tensor  i64 [m]
---@return Tensor
function M.words(teacher, tokens, options, places)
  local who = "distill.mamba.words"
  decoder_of(who, teacher)
  arguments.expect(who, "options", options, "a table")
  local with = {}
  for key, value in pairs(options) do with[key] = value end
  with.places = arguments.expect(who, "places", places, "a tensor")
  return ty.no_grad(function() return teacher:head(teacher:hidden(tokens, with)):select(0, 0) end)
end

--- Trains a student in stages. draw() gives tokens, options of hidden(), where in the flattened tokens words are
-- learnt, i64 [m], and, if they are known, the teacher's logits there [m, vocabulary]. stages: of each, steps and lr; 0
-- steps leave a stage out. options: watch(stage, step, loss). Returns the mean loss of the last tenth of each stage's
-- steps.
---@param teacher LanguageModel
---@param student LanguageModel
---@param draw fun(): Tensor, table, Tensor, Tensor?
---@param stages { steps: integer, lr: number }[]
---@param options? { watch?: function }
---@return number[] losses
function M.fit(teacher, student, draw, stages, options)
  local who = "distill.mamba.fit"
  decoder_of(who, teacher)
  decoder_of(who, student)
  arguments.expect(who, "draw", draw, "a function")
  arguments.expect(who, "stages", stages, "a list of tables")
  local o = arguments.read(who, options, { watch = arguments.none }, { watch = "a function" })
  teacher:eval()
  student:train()
  local losses = {}
  for stage, plan in ipairs(stages) do
    if plan.steps > 0 then
      local opt = ty.optim.AdamW(learners(student, stage), { lr = plan.lr, beta2 = 0.95, clip_norm = 1,
        weight_decay = 0, schedule = ty.optim.cosine { steps = plan.steps, warmup = plan.steps // 10, final = 0.05 } })
      losses[stage] = ty.train.minimize(opt, plan.steps, function()
        local tokens, given, places, reference = draw()
        if stage < 3 then return M.alignment(teacher, student, tokens, given) end
        local with = {}
        for key, value in pairs(given) do with[key] = value end
        with.places = places
        reference = reference or M.words(teacher, tokens, given, places)
        return M.divergence(reference, student:head(student:hidden(tokens, with)):select(0, 0))
      end, o.watch and function(step, value) o.watch(stage, step, value) end or nil)
    end
  end
  student:eval()
  return losses
end

--- A cache of one row as it is after so many tokens, with states, keys and values drawn at random: what a further token
-- costs depends on how many there are, not on what they say, and n of them need not be read for it.
---@param model LanguageModel  a decoder with attention, with states, or with both
---@param tokens integer  that it holds
---@param room integer    tokens that fit in
---@return Cache
function M.context(model, tokens, room)
  local who = "distill.mamba.context"
  local decoder = decoder_of(who, model)
  arguments.expect(who, "tokens", tokens, "an integer >= 2")
  arguments.expect(who, "room", room, ("an integer >= %d"):format(tokens))
  local config, there = decoder.config, { device = decoder:device() }
  local cache = decoder:cache { room = room }
  ty.no_grad(ty.scope, function() -- the first token is read, so that the layers' states are there
    decoder:hidden(ty.zeros({ 1, 1 }, { dtype = "i64", device = there.device }), { cache = cache })
    for l, layer in ipairs(decoder.model.layers) do
      if layer.self_attn.mixer then
        cache:skip(l, tokens - 1)
        cache[l].state:normal_()
      else
        local shape = { 1, config.num_key_value_heads or config.num_attention_heads, tokens - 1,
          config.head_dim or config.hidden_size // config.num_attention_heads }
        cache:append(l, ty.randn(shape, there), ty.randn(shape, there))
      end
    end
  end)
  cache:advance(tokens - 1)
  return cache
end

return M
