--- What ops keep for the backward pass, packed by kind: peft.packed.
--
--     local loss = peft.packed.run({ model = model, kinds = { ["gelu.x"] = "fixed4", ["layer_norm.x"] = "q8_0" } },
--       function() return model:loss(pictures, labels) end)
--     loss:backward()
--
-- The forward pass is what it was; only the backward pass computes with what the codes give. A storage is packed once,
-- however many ops keep it or views of it. The codecs, and what they take of 32 bits:
--   q8_0    blocks of 32 with a scale in f16 and codes of 8 bits: 8.5 bits, off by at most 1/254 of their largest
--   q4_0    the same with codes of 4 bits: 4.5 bits, off by at most 1/8 of the largest
--   fixed4  steps of 0.5 from -4 to 3.5: 4 bits. Of GELU, whose slope hardly changes outside, as SlimFit has it
--   prune   of each row the tenth that is furthest from its mean, the rest is that mean: 3.2 bits, and as SlimFit has
--           it of inputs of norms, whose own statistics are kept in full
-- Ardakani et al. 2023, "SlimFit: Memory-Efficient Fine-Tuning of Transformer-based Models Using Training Dynamics".
local ty = require "tycho"
local arguments = require "tycho.arguments"
local saved = require "tycho.peft.saved"

local tier = ty.core.tier_core
local expect = arguments.expect
local M = {}

-- Each codec: encode(x) of a storage as rows [n, 32] (rows = true: of the kept tensor itself), which returns the
-- tensors that stay; decode(parts, like), like: { dtype, shape }.
local codecs = {}

for _, format in ipairs { "q8_0", "q4_0" } do
  codecs[format] = {
    encode = function(x) return { x:quantize(format) } end,
    decode = function(parts, like) return parts[1]:dequantize(like.dtype) end,
  }
end

codecs.fixed4 = {
  encode = function(x)
    local codes = (x * 2):round():clamp(-8, 7):add_(8):to("u8"):reshape(-1, 2)
    return { codes:select(1, 0) + codes:select(1, 1) * 16 }
  end,
  decode = function(parts, like)
    return (ty.stack({ parts[1]:bitwise_and(15), parts[1]:floor_div(16) }, 1):to(like.dtype) - 8):mul_(0.5)
  end,
}

codecs.prune = {
  rows = true,
  encode = function(x)
    local d = x.shape[x.ndim]
    local rows = x:reshape(-1, d)
    local mean = rows:mean(1, true)
    local far = rows - mean
    local _, at = far:abs():topk(math.max(1, d // 10), 1)
    return { far:gather(1, at):to "f16", at:to "i16", mean }
  end,
  decode = function(parts, like)
    local n, d = parts[1].shape[1], like.shape[#like.shape]
    local x = ty.zeros({ n, d }, { dtype = like.dtype, device = parts[1].device })
    return x:scatter(1, parts[2]:to "i64", parts[1]:to(like.dtype)):add_(parts[3]:to(like.dtype))
  end,
}

--- The names of the codecs.
M.codecs = { "q8_0", "q4_0", "fixed4", "prune" }

local function codec_named(who, what, name)
  if name ~= "none" and not codecs[name] then
    arguments.fail("%s: %s: expected one of none, %s, got %s", who, what, table.concat(M.codecs, ", "),
      arguments.describe(name))
  end
  return codecs[name]
end

-- x as the codec takes it; nil where it does not fit.
local function fitting(codec, t)
  if not t:is_floating_point() or t:numel() == 0 then return nil end
  if codec.rows then
    if t.ndim < 2 or t.shape[t.ndim] > 32767 then return nil end
    return t
  end
  local bytes, how = tier.unfold(t)
  local rows = bytes and bytes:view(t.dtype)
  if not rows or rows:numel() % 32 ~= 0 then return nil end
  return rows:reshape(-1, 32), how
end

-- The record of a packed storage, and what makes the kept tensor of it.
local function encode(codec, t)
  local x, how = fitting(codec, t)
  if not x then return nil end
  local like = { dtype = t.dtype, shape = t.shape }
  local parts = ty.no_grad(ty.scope, codec.encode, x)
  local nbytes = 0
  for _, part in ipairs(parts) do
    ty.keep(part)
    nbytes = nbytes + part:nbytes()
  end
  return { codec = codec, parts = parts, like = like, nbytes = nbytes }, how
end

local function decode(box)
  return ty.no_grad(ty.scope, function()
    local record = box.record
    local x = record.codec.decode(record.parts, record.like)
    if record.codec.rows then return x:reshape(record.like.shape) end
    return tier.fold(x:flatten():contiguous(), box.how)
  end)
end

--- A tensor as a codec gives it back, and the bytes that the codes take. For a look at what a codec loses.
---@param x Tensor
---@param name string  one of peft.packed.codecs
---@return Tensor
---@return integer bytes
function M.through(x, name)
  local who = "peft.packed.through"
  expect(who, "x", x, "a tensor")
  local codec = codec_named(who, "name", name)
  x = x:detach():contiguous():clone()
  local record, how
  if codec then record, how = encode(codec, x) end
  if not record then return x, x:nbytes() end
  return decode { record = record, how = how }, record.nbytes
end

local defaults = { model = arguments.none, kinds = arguments.none, choose = arguments.none, smallest = 1024 }
local words = { model = "a module", kinds = "a table", choose = "a function", smallest = "an integer >= 0" }

--- Runs fn(...) so that what its ops keep is packed; backward passes through the graph are possible once. options:
--   kinds     codecs by "op.argument": { ["gelu.x"] = "fixed4" }; what is not named stays as it is
--   choose    a function(tensor, op, argument) that names the codec instead, or nil
--   model     whose parameters and buffers are never packed
--   smallest  bytes of a tensor below which it stays (1024)
-- What does not fit the codec stays as well: integers, sizes that are no multiple of 32, memory of a GPU. Tensors that
-- nothing but the graph needs are gone from memory when their handles are: run the parts of a model in ty.scope.
---@param options {model?: Module, kinds?: table<string, string>, choose?: function, smallest?: integer}
---@param fn function
---@return any ...  what fn returns
function M.run(options, fn, ...)
  local who = "peft.packed.run"
  local o = arguments.read(who, expect(who, "options", options, "a table"), defaults, words)
  expect(who, "fn", fn, "a function")
  for kind, name in pairs(o.kinds or {}) do codec_named(who, "kinds, of " .. tostring(kind), name) end
  local own, handed, last = o.model and saved.memory(o.model) or {}, nil, {}
  local function let_go()
    if last.tensor then last.tensor:free() end
    last = {}
  end
  local function codec_of(t, op, what)
    local name = o.choose and o.choose(t, op, what)
    if name == nil and o.kinds then name = o.kinds[op .. "." .. what] end
    return name and t:nbytes() >= o.smallest and codec_named(who, "choose", name) or nil
  end
  local function pack(t, op, what)
    local codec = codec_of(t, op, what)
    local memory, version = tier.memory_of(t)
    if not codec or own[memory] then return { tensor = ty.keep(t) } end
    -- What ops keep of the same storage one after another, queries, keys and values say. The tensor packed last is held
    -- for that: a storage that is gone may be followed by another at its place.
    local record = last.record
    local how
    if record and last.memory == memory and last.version == version and record.codec == codec and not codec.rows then
      local bytes
      bytes, how = tier.unfold(t)
      bytes:free()
      t:free()
    else
      record, how = encode(codec, t)
      if not record then return { tensor = ty.keep(t) } end
      let_go()
      last = { tensor = ty.keep(t), memory = memory, version = version, record = record }
    end
    record.uses = (record.uses or 0) + 1
    return { record = record, how = how }
  end
  local function unpack(box)
    if handed then handed:free() end -- the engine has a reference of its own by now
    handed = nil
    if box.spent then arguments.fail("%s: a graph of packed tensors can be walked back once", who) end
    box.spent = true
    if box.tensor then
      handed, box.tensor = box.tensor, nil
    else
      local record = box.record
      handed = ty.keep(decode(box))
      record.uses = record.uses - 1
      if record.uses == 0 then
        for _, part in ipairs(record.parts) do part:free() end
        record.codec = nil -- nobody gets it any more
      end
    end
    return handed
  end
  local results = table.pack(pcall(ty.saved_tensor_hooks, pack, unpack, fn, ...))
  let_go()
  if not results[1] then error(results[2], 0) end
  return table.unpack(results, 2, results.n)
end

return M
