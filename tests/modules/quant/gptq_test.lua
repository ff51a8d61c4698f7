-- GPTQ: the codes against the algorithm of the paper without its shortcuts, packing, models, what is refused.
local here = (arg and arg[0]:match ".*/" or "tests/modules/quant/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local scratch = dofile(here .. "scratch.lua")
local second_order = dofile(check.root .. "tests/modules/second_order.lua")
local ty = require "tycho"
local llm, quant = require "tycho.llm", require "tycho.quant"
local formats = require "tycho.quant.formats"

local gptq, bytes = quant.gptq, ty.io.to_bytes
local root = check.root .. "tests/fixtures/llm/"

local inputs = second_order.inputs

-- |(w - q) X|^2
local function off(w, q, moment)
  local e = w:to "f64" - q:to "f64"
  return (ty.matmul(e, moment:to "f64") * e):sum():item()
end

local function nearest(x, top)
  local low = math.floor(x)
  if x - low > 0.5 or (x - low == 0.5 and low % 2 == 1) then low = low + 1 end
  return math.max(0, math.min(top, low))
end

-- Section 3.1 and equation 3 of the paper as they stand: after each column the inverse of what is left of the Hessian
-- is had by elimination; all rows in one order. Tables from 1.
local function plain(w, moment, o)
  local columns, top = #w[1], (1 << o.bits) - 1
  local inverse = second_order.inverse(moment, o.damp)
  local order = {}
  for i = 1, columns do order[i] = i end
  if o.act_order then table.sort(order, function(a, b) return moment[a][a] > moment[b][b] end) end
  local codes, left, scale, offset = {}, {}, {}, {}
  local group = o.group > 0 and o.group or columns
  local function grid(from, row)
    local low, high = 0, 0
    for j = from, from + group - 1 do low, high = math.min(low, left[row][j]), math.max(high, left[row][j]) end
    if o.symmetric then
      high = math.max(high, -low)
      low = low < 0 and -high or low
    end
    local s = (high - low) / top
    local zero = o.symmetric and (top + 1) / 2 or math.floor(-low / s + 0.5)
    for j = from, from + group - 1 do scale[row][j], offset[row][j] = s, -s * zero end
  end
  for r = 1, #w do
    left[r], codes[r], scale[r], offset[r] = { table.unpack(w[r]) }, {}, {}, {}
    if o.act_order then for from = 1, columns, group do grid(from, r) end end
  end
  for step, i in ipairs(order) do
    for r = 1, #w do
      if not o.act_order and (i - 1) % group == 0 then grid(i, r) end
      local s, z = scale[r][i], offset[r][i]
      codes[r][i] = nearest((left[r][i] - z) / s, top)
      local e = (left[r][i] - (s * codes[r][i] + z)) / inverse[i][i]
      for k = step + 1, columns do
        local j = order[k]
        left[r][j] = left[r][j] - e * inverse[i][j]
      end
    end
    second_order.eliminate(inverse, i)
  end
  return codes
end

check.test("the codes are those of the paper's algorithm in f64", function()
  ty.manual_seed(1)
  for _, o in ipairs {
    { bits = 3, group = 0, block = 128 }, { bits = 4, group = 8, block = 128 }, { bits = 2, group = 8, block = 5 },
    { bits = 3, group = 12, block = 7, symmetric = true }, { bits = 3, group = 0, block = 5, act_order = true },
    { bits = 2, group = 8, block = 128, act_order = true }, { bits = 4, group = 0, block = 1, symmetric = true },
  } do
    o.damp = 0.01
    local _, moment = inputs(60, 24, "f64")
    local w = ty.randn(5, 24, { dtype = "f64" })
    local value, codes = gptq.solve(w, moment, o)
    local what = ("bits %d, group %d, block %d"):format(o.bits, o.group, o.block)
    check.equal(codes:tolist(), plain(w:tolist(), moment:tolist(), o), what)
    local scale, offset = gptq.grid(w, o)
    if o.group == 0 then check.close(value:tolist(), (codes:to "f64" * scale + offset):tolist(), 1e-12, what) end
    check.ok(off(w, value, moment) < 0.75 * off(w, (w - offset):div(scale):round():clamp(0, (1 << o.bits) - 1) * scale
      + offset, moment) or o.group > 0, what .. ": less error than rounding")
  end
end)

check.test("the last group of a row may be shorter", function()
  ty.manual_seed(8)
  local _, moment = inputs(90, 22, "f64")
  local w = ty.randn(4, 22, { dtype = "f64" })
  for _, act_order in ipairs { false, true } do
    local o = { bits = 3, group = 8, damp = 0.01, block = 128, act_order = act_order }
    local value, codes = gptq.solve(w, moment, o)
    check.equal(codes.shape, { 4, 22 })
    check.ok(off(w, value, moment) < 0.2 * off(w, w * 0, moment))
    if act_order then -- grids are those of the weights as they were
      local scale, offset = gptq.grid(w:narrow(1, 16, 6), o)
      check.close(value:narrow(1, 16, 6):tolist(), (codes:narrow(1, 16, 6):to "f64" * scale + offset):tolist(), 1e-12)
    end
  end
end)

check.test("searched ranges round with less error, and zeros stay", function()
  ty.manual_seed(2)
  local w = ty.randn(40, 64)
  w:select(0, 3):fill_(0)
  for _, symmetric in ipairs { false, true } do
    local function left(mse)
      local scale, offset = gptq.grid(w, { bits = 3, symmetric = symmetric, mse = mse })
      local value = ((w - offset) / scale):round():clamp(0, 7) * scale + offset
      check.equal(value:select(0, 3):abs():max():item(), 0.0)
      return (value - w):abs():pow(2.4):sum():item()
    end
    check.ok(left(true) < 0.9 * left(false))
  end
end)

check.test("formats: nothing is lost in packing, and errors are those of the grid", function()
  ty.manual_seed(3)
  local _, moment = inputs(900, 512)
  local w = ty.randn(7, 512) * 0.05
  for _, format in ipairs { "q4_0", "q2_k", "q3_k", "q4_k" } do
    local q = w:to(format)
    local scale, offset = formats.grid(q)
    local function spread(x) return x:unsqueeze(2):expand(7, x.shape[2], 512 // x.shape[2]):reshape(7, 512) end
    scale, offset = spread(scale), spread(offset)
    local codes = ((q:to "f32" - offset) / scale):round():to "u8"
    check.ok(bytes(formats.with_codes(q, codes)) == bytes(q), format .. ": the same codes give the same bytes")
    for _, act_order in ipairs { false, true } do
      local o = { format = format, damp = 0.01, block = 128, act_order = act_order, bits = formats.get("", format).bits,
        group = formats.get("", format).group }
      local value, _, packed = gptq.solve(w, moment, o)
      check.equal(packed.dtype, format)
      check.ok(packed:to("f32"):eq(value):all():item(), format .. ": the packed values")
      check.ok(off(w, value, moment) < 0.85 * off(w, q:to "f32", moment), format .. ": less error than rounding")
    end
  end
end)

local function batches(vocabulary, count, length)
  local list = {}
  for i = 1, count do
    local tokens = ty.randint(0, vocabulary, { 1, length })
    list[i] = { tokens = tokens, cu_seqlens = ty.tensor({ 0, length // 3, length }, { dtype = "i64" }),
      longest = length }
  end
  return list
end

-- Weights large enough for layers to differ from each other.
local function shaken(model, size)
  for _, p in ipairs(model:parameters()) do if p.ndim >= 2 then p:detach():normal_(0, size) end end
  return model
end

check.test("models of all families: every layer of the blocks, with less error than rounding", function()
  ty.manual_seed(4)
  for _, name in ipairs { "llama", "mistral", "mixtral", "qwen2", "qwen3", "gpt2" } do
    local model = shaken(llm.load(root .. name, { dtype = "f32" }), 0.2)
    local before, rounded = model:clone(), model:clone()
    local data = batches(model.config.vocab_size, 3, 48)
    local report = gptq.quantize(model, data, { bits = 3, act_order = true })
    quant.round(rounded, { bits = 3 })
    local state, old, near = model:state_dict(), before:state_dict(), rounded:state_dict()
    local changed, named = {}, {}
    for _, layer in ipairs(report) do
      named[layer.name .. ".weight"] = true
      check.ok(layer.error >= 0 and layer.error < 0.2, ("%s %s: %g"):format(name, layer.name, layer.error))
    end
    for key, tensor in pairs(state) do
      if not tensor:eq(old[key]):all():item() then changed[key] = true end
    end
    check.equal(changed, named, name)
    local tokens = data[1].tokens
    local function distance(other)
      return (other(tokens) - before(tokens)):square():mean():item()
    end
    check.ok(distance(model) < distance(rounded), ("%s: %g and %g"):format(name, distance(model), distance(rounded)))
    check.ok(near ~= nil and report.bits > 3 and report.bits < 5)
  end
end)

-- A Llama whose rows are whole blocks.
local function wide()
  ty.manual_seed(5)
  return shaken(llm.Llama { vocab_size = 90, hidden_size = 256, intermediate_size = 512, num_hidden_layers = 2,
    num_attention_heads = 4, num_key_value_heads = 2, max_position_embeddings = 64 }, 0.06)
end

check.test("packed weights: the model that was quantized, in memory and as a GGUF file", function()
  local model = wide()
  local before, data = model:clone(), batches(90, 4, 60)
  for _, format in ipairs { "q4_k", "q3_k", "q2_k", "q4_0" } do
    local packed, plain_one = before:clone(), before:clone()
    local report = gptq.quantize(packed, data, { format = format })
    check.close(report.bits, ({ q4_k = 4.5, q3_k = 3.4375, q2_k = 2.625, q4_0 = 4.5 })[format], 1e-9)
    for name, t in pairs(packed:state_dict()) do
      local inside = name:find "proj"
      check.equal(t.dtype, inside and format or "f32", name)
      if inside then plain_one:state_dict()[name]:detach():copy_(t:to "f32") end
    end
    local tokens = data[1].tokens
    local want, got = plain_one(tokens), packed(tokens)
    check.ok((got - want):abs():max():item() < 0.05 * want:abs():max():item(), ("%s: logits by %g of %g"):format(format,
      (got - want):abs():max():item(), want:abs():max():item()))
    local path = scratch.file(format .. ".gguf")
    local saved = quant.save(packed, path)
    check.equal(saved.tensors["blk.1.ffn_down.weight"], format)
    check.equal(saved.error, 0.0)
    local loaded = llm.load(path, { dtype = "f32" })
    local again = loaded(tokens)
    check.ok((again - got):abs():max():item() < 0.05 * want:abs():max():item(), ("%s: logits of the file by %g"):format(
      format, (again - got):abs():max():item()))
    local second = scratch.file(format .. "_again.gguf")
    quant.save(loaded, second)
    check.ok((llm.load(second, { dtype = "f32" })(tokens) - again):abs():max():item() == 0, format .. ": written again")
    check.fails(function() gptq.quantize(packed, data, { bits = 3 }) end, "q_proj is quantized already")
  end
end)

check.test("a dataset of packed rows; the same seed, the same model", function()
  local path = scratch.file "tokens.safetensors"
  ty.manual_seed(6)
  local documents = {}
  for i = 1, 20 do documents[i] = ty.randint(0, 90, { 40 + i }) end
  llm.data.write(path, documents)
  local data = llm.data.Packed(path, { length = 32, jitter = true })
  local function run(seed)
    local model = wide()
    gptq.quantize(model, data, { bits = 2, group = 64, rows = 12, batch = 4, seed = seed })
    return bytes(model.model.layers[2].mlp.down_proj.weight)
  end
  check.ok(run(1) == run(1))
  check.ok(run(1) ~= run(2))
end)

check.test("an input that is always zero", function()
  ty.manual_seed(7)
  local x = ty.randn(50, 16)
  x:select(1, 5):fill_(0)
  local w = ty.randn(4, 16)
  local value = gptq.solve(w, ty.matmul(x:transpose(0, 1), x), { bits = 4, group = 0, damp = 0, block = 128 })
  check.ok(value:isfinite():all():item())
  check.ok((value - w):select(1, 5):abs():max():item() < 0.4)
end)

check.test("what is refused", function()
  local data = batches(90, 1, 30)
  local function fails(options, message, change, rows)
    local model = wide()
    if change then change(model) end
    check.fails(function() gptq.quantize(model, rows or data, options) end, message)
  end
  fails({ bits = 5 }, "quant.gptq: bits: expected 2, 3, 4 or 8, got 5")
  fails({ format = "q5_k" }, "format: expected q2_k, q3_k, q4_0, q4_k, got q5_k")
  fails({ group = -1 }, "group: columns that share a scale")
  fails({ damp = -1 }, "damp: expected a share of the mean")
  fails({ block = 0 }, "block: expected a positive integer")
  fails({ rows = 0 }, "rows: expected a positive integer")
  fails({ bit = 3 }, "no option 'bit'")
  fails({}, "data: expected a dataset of llm.data.Packed or a list", nil, "text")
  fails({ damp = 0 }, "the Hessian of model.layers.0.self_attn.q_proj is singular") -- 30 rows of 256 inputs
  fails({}, "q_proj: a weight is not finite", function(model)
    model.model.layers[1].self_attn.q_proj.weight:detach()["3, 4"] = 0 / 0
  end)
  fails({}, "the inputs of model.layers.0.self_attn.q_proj are not finite", function(model)
    model.model.embed_tokens.weight:detach():fill_(0 / 0)
  end)
  check.fails(function() gptq.quantize(ty.nn.Linear(3, 3), data) end, "the model has no list of layers")
  check.fails(function() quant.round(llm.load(root .. "gpt2"), { format = "q4_0" }) end, "format: ")
  check.fails(function() quant.round(wide(), { bits = 1 }) end, "quant.round: bits: expected")
  check.fails(function() quant.save(wide(), scratch.file "x.gguf", { dtype = "q5_k" }) end, "quant.save: dtype")
end)

check.test("any network, by what its layers get in calls", function()
  ty.manual_seed(7)
  local nn = ty.nn
  local model = nn.Sequential(nn.Linear(16, 16), nn.ModuleList { nn.Sequential(nn.Linear(16, 24), nn.ReLU(),
    nn.Linear(24, 16)) })
  function model:forward(x, by) return self[2][1](self[1](x) * by) end
  local calls = { table.pack(ty.randn(64, 16), 1.0), table.pack(ty.randn(64, 16), 2.0) }
  local up, down, first = model[2][1][1], model[2][1][3], model[1].weight:detach():clone()
  local wanted = {}
  for i, layer in ipairs { up, down } do
    local moment = ty.zeros({ layer.weight.shape[2], layer.weight.shape[2] }, { dtype = "f64" })
    local remove = layer:register_forward_pre_hook(function(_, x)
      x = x:detach()
      moment:add_(ty.matmul(x:transpose(0, 1), x):to "f64")
    end)
    ty.no_grad(function()
      for _, call in ipairs(calls) do model(call[1], call[2]) end
    end)
    remove()
    wanted[i] = gptq.solve(layer.weight:detach(), moment, { bits = 2, group = 8, symmetric = false, mse = false,
      act_order = false, damp = 0.01, block = 128 })
  end
  local report = gptq.network(model, calls, { bits = 2, group = 8 })
  check.equal(#report, 2)
  check.close(up.weight:tolist(), wanted[1]:tolist(), 1e-6)
  check.close(down.weight:tolist(), wanted[2]:tolist(), 1e-6)
  check.equal(model[1].weight:tolist(), first:tolist(), "outside of the blocks")
  check.fails(function() gptq.network(model, {}) end, "quant.gptq.network: calls: expected at least one")
  check.fails(function() gptq.network(model, calls, { bits = 5 }) end, "quant.gptq.network: bits")
end)

scratch.clean()
check.finish()
