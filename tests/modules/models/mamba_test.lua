-- Mamba and Mamba-2 beside what families_test.lua compares with transformers: the layers against their recurrences in
-- float64, states passed on in pieces, padding, generation, files, wrong configs.
local here = (arg and arg[0]:match ".*/" or "tests/modules/models/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local hub = require "tycho.hub"
local models = require "tycho.models"
require "tycho.llm" -- generation

local function new(name, more)
  ty.manual_seed(3)
  local config = { vocab_size = 40, hidden_size = 24, state_size = 5, num_hidden_layers = 2 }
  if name == "Mamba2" then config.num_heads, config.head_dim, config.n_groups = 6, 8, 2 end
  for key, value in pairs(more or {}) do config[key] = value end
  local model = models[name](config)
  -- Large weights, so that what a token sees makes a difference.
  for _, p in ipairs(model:parameters()) do if p.ndim == 2 then p:detach():normal_(0, 0.4) end end
  return model
end

local function near(got, want, what, bar)
  check.equal(got.shape, want.shape, what .. " shape")
  local off = (got:to "f64" - want:to "f64"):abs():max():item() / math.max(want:abs():max():item(), 1e-30)
  check.ok(off <= (bar or 1e-5), ("%s: relative error %.2g"):format(what, off))
end

local function convolved(layer, x)
  local padded, rows = x:pad { 0, 0, layer.conv1d.size - 1, 0 }, {}
  for t = 0, x.shape[2] - 1 do
    local window = padded:narrow(1, t, layer.conv1d.size):transpose(1, 2)
    rows[t + 1] = (window * layer.conv1d.weight:squeeze(1)):sum(-1)
  end
  return (ty.stack(rows, 1) + layer.conv1d.bias):silu()
end

-- The layers as the papers write them, one token after the other.
local by_hand = {}
function by_hand.Mamba(layer, x)
  local both = layer.in_proj(x)
  local u, gate = convolved(layer, both:narrow(2, 0, layer.inner)), both:narrow(2, layer.inner, layer.inner)
  local read = layer.x_proj(u)
  local step = layer.dt_proj(read:narrow(2, 0, layer.rank)):softplus()
  local h, rows = 0, {}
  for t = 0, x.shape[2] - 1 do
    local function column(from) return read:select(1, t):narrow(1, layer.rank + from, layer.states):unsqueeze(1) end
    local d = step:select(1, t):unsqueeze(-1)
    h = (d * -layer.A_log:exp()):exp() * h + d * u:select(1, t):unsqueeze(-1) * column(0)
    rows[t + 1] = (h * column(layer.states)):sum(-1)
  end
  return layer.out_proj((ty.stack(rows, 1) + u * layer.D) * gate:silu())
end
function by_hand.Mamba2(layer, x)
  local b, t_all = x.shape[1], x.shape[2]
  local all = layer.in_proj(x)
  local gate, n, groups = all:narrow(2, 0, layer.inner), layer.states, layer.groups
  local u = convolved(layer, all:narrow(2, layer.inner, layer.channels))
  local step = (all:narrow(2, layer.inner + layer.channels, layer.heads) + layer.dt_bias):softplus()
  local h, rows = 0, {}
  for t = 0, t_all - 1 do
    local now = u:select(1, t)
    local v = now:narrow(1, 0, layer.inner):reshape(b, layer.heads, layer.width, 1)
    local function of_heads(from)
      return now:narrow(1, layer.inner + from, groups * n):reshape(b, groups, n)
        :repeat_interleave(layer.heads // groups, 1):unsqueeze(2)
    end
    local d = step:select(1, t):reshape(b, layer.heads, 1, 1)
    h = (d * -layer.A_log:exp():reshape(-1, 1, 1)):exp() * h + d * v * of_heads(0)
    rows[t + 1] = ((h * of_heads(groups * n)):sum(-1) + v:squeeze(-1) * layer.D:unsqueeze(-1)):flatten(1)
  end
  local y = (ty.stack(rows, 1) * gate:silu()):reshape(b, t_all, groups, -1)
  y = y * (y:square():mean({ -1 }, true) + layer.norm.eps):rsqrt()
  return layer.out_proj(y:reshape(b, t_all, -1) * layer.norm.weight)
end

for name, recurrence in pairs(by_hand) do
  check.test(name .. ": the layer is the recurrence, with gradients", function()
    local layer = new(name).backbone.layers[1].mixer:to "f64"
    local x = ty.randn({ 2, 37, 24 }, { dtype = "f64" }):requires_grad_()
    local y, want = layer(x, {}), recurrence(layer, x)
    near(y, want, "result", 1e-12)
    local weight = ty.randn_like(y)
    local inputs = { x }
    for _, p in ipairs(layer:parameters()) do inputs[#inputs + 1] = p end
    local grads, expected = ty.grad((y * weight):sum(), inputs), ty.grad((want * weight):sum(), inputs)
    for i, g in ipairs(grads) do near(g, expected[i], "gradient " .. i, 1e-10) end
  end)

  check.test(name .. ": pieces of a text give what the whole gives, and padding on the left changes nothing", function()
    local model = new(name):eval()
    local tokens = ty.randint(0, 40, { 2, 45 })
    local whole = ty.no_grad(model.forward, model, tokens)
    local cache, at, rows = model:cache(), 0, {}
    for _, count in ipairs { 20, 1, 1, 2, 21 } do
      rows[#rows + 1] = ty.no_grad(model.forward, model, tokens:narrow(1, at, count), { cache = cache })
      at = at + count
    end
    near(ty.concat(rows, 1), whole, "pieces")
    check.equal(cache.past, 45)
    local hidden = ty.no_grad(model.hidden, model, tokens)
    near(ty.no_grad(model.hidden, model, tokens, { last = 3 }), hidden:narrow(1, 42, 3), "last")
    local mask = ty.ones({ 2, 51 }, { dtype = "i64" })
    mask[":, :6"]:fill_(0)
    local padded = ty.concat({ ty.full({ 2, 6 }, 7, { dtype = "i64" }), tokens }, 1)
    near(ty.no_grad(model.forward, model, padded, { mask = mask }):narrow(1, 6, 45), whole, "padded")
    near(model(tokens, { checkpoint = true }), whole, "checkpoints")
    -- Rows of different lengths generate what each does alone.
    local prompts = { tokens:select(0, 0):narrow(0, 0, 9), tokens:select(0, 1):narrow(0, 0, 4) }
    local together = model:generate(prompts, 12, { temperature = 0 })
    for i, prompt in ipairs(prompts) do
      local alone = model:generate(prompt:unsqueeze(0), 12, { temperature = 0 }):select(0, 0)
      check.equal(together[i]:tolist(), alone:tolist(), "row " .. i)
    end
  end)

  check.test(name .. ": it learns to copy, and is written and read", function()
    ty.manual_seed(1)
    local model = new(name)
    local opt = ty.optim.AdamW(model:parameters(), { lr = 1e-2 })
    local half = ty.randint(1, 40, { 8, 4 })
    local tokens = ty.concat({ half, half }, 1)
    local first, loss
    for _ = 1, 60 do
      loss = model:loss(tokens)
      opt:step(loss)
      first = first or loss:item()
    end
    check.ok(loss:item() < 0.5 * first, ("%.3f after %.3f"):format(loss:item(), first))
    local path = os.tmpname()
    os.remove(path)
    model:eval():save(path)
    local other = hub.load(path)
    check.equal({ other.report.unexpected, other.report.missing, other.config.unknown }, { {}, {}, {} })
    near(other(tokens), model(tokens), "read")
    for _, file in ipairs(ty.io.listdir(path)) do os.remove(path .. "/" .. file) end
    os.remove(path)
  end)
end

check.test("limits without an end, as the first files and as later ones write them", function()
  local path = os.tmpname()
  os.remove(path)
  local model = new("Mamba2", { time_step_limit = { 0.01, math.huge } })
  model:save(path)
  local config = ty.io.read(path .. "/config.json")
  for _, limit in ipairs { "Infinity", '{"__float__": "Infinity"}' } do
    ty.io.write_atomic(path .. "/config.json", (config:gsub("^{",
      '{"note": "an \\"Infinity\\" in a text", "time_step_limit": [0.01, ' .. limit .. "],", 1)))
    local other = hub.load(path)
    check.equal(other.config.time_step_limit, { 0.01, math.huge })
    check.equal(other.config.unknown, { "note" })
    check.equal(other.config.given.note, 'an "Infinity" in a text')
  end
  for _, file in ipairs(ty.io.listdir(path)) do os.remove(path .. "/" .. file) end
  os.remove(path)
end)

check.test("defaults are the published sizes", function()
  local function count(name, config)
    return ty.nn.with_defaults({ device = "meta" }, models[name], config):count_parameters()
  end
  check.equal(count("Mamba", { num_hidden_layers = 24 }), 129135360) -- mamba-130m
end)

check.test("configs and inputs that cannot be are one clear error", function()
  check.fails(function() new("Mamba", { time_step_rank = 0 }) end,
    "Mamba: config key 'time_step_rank' must be a positive integer or auto, got 0")
  check.fails(function() new("Mamba", { expand = 0.01 }) end, "Mamba: expand 0.01 leaves a layer no width")
  check.fails(function() new("Mamba", { hidden_act = "sine" }) end, "'hidden_act': unknown activation 'sine'")
  check.fails(function() new("Mamba", { time_step_min = 0 }) end, "expected 0 < time_step_min <= time_step_max, got 0")
  check.fails(function() new("Mamba2", { num_heads = 5 }) end,
    "Mamba2: num_heads 5 times head_dim 8 must be hidden_size 24 times expand 2")
  check.fails(function() new("Mamba2", { n_groups = 4 }) end, "Mamba2: n_groups 4 must divide num_heads 6")
  check.fails(function() new("Mamba2", { time_step_limit = { 2, 1 } }) end, "must be two numbers, the first not above")
  local model = new "Mamba"
  check.fails(function() model { 1, 2 } end, "Mamba: tokens: expected an i64 tensor [n, t], got a table")
  local tokens = ty.ones({ 1, 4 }, { dtype = "i64" })
  check.fails(function() model(tokens, { cu_seqlens = ty.tensor { 0, 4 } }) end,
    "Mamba: cu_seqlens is not an option of this family")
  check.fails(function() model(tokens, { mask = ty.ones(1, 4, 4) }) end, "Mamba: mask: expected bool or i64 [n, t]")
end)

check.finish()
