--- Matrices with zeros, stored without them and multiplied so: less is read, and the product is that of the dense
-- matrix. Two forms: `bitmap`, a bit for each element and the others one after another in f16, of a matrix with a share
-- s of zeros 2 (1 - s) + 1/8 bytes for each element; and `csl`, of Xia et al. 2023, "Flash-LLM: Enabling Cost-Effective
-- and Highly-Efficient Large Generative Model Inference with Unstructured Sparsity", 4 (1 - s).
--
--     prune.sparsegpt(model, dataset, { sparsity = 0.7 })
--     prune.release(model)
--     prune.save(model, "sparse")              -- packed; prune.load reads it
--     prune.compact(model)                     -- layers read what is left of their weights
local ty = require "tycho"
local arguments = require "tycho.arguments"

local nn = ty.nn
local surgery = nn.surgery
local M = {}

local TALL, WIDE = 128, 64 -- of a tile: kernels/packed.h

--- Where the values of each row begin and the last ends: i64 [rows + 1] of a mask [rows, n].
function M.starts(mask)
  return ty.concat({ ty.zeros({ 1 }, { dtype = "i64" }), mask:to("i64"):sum(1):cumsum(0) }, 0)
end

local function bits() return ty.tensor({ 1, 2, 4, 8, 16, 32, 64, 128 }, { dtype = "i32" }) end

--- Packs a matrix. Column c of a row is bit c % 8 of its byte c // 8.
---@param weight Tensor  [rows, columns], which is rounded to f16
---@return { values: Tensor, bitmap: Tensor, starts: Tensor, columns: integer } packed  f16 [nonzeros] by rows; u8
---  [rows, columns / 8]; i64 [rows + 1], where the values of each row begin and the last ends
function M.pack(weight)
  arguments.expect("prune.pack", "weight", weight, "a tensor")
  if weight.ndim ~= 2 or not weight:is_floating_point() then
    arguments.fail("prune.pack: weight: expected a matrix of floats, got %s", arguments.describe(weight))
  end
  return ty.no_grad(function()
    local half = weight:detach():to { dtype = "f16", device = "cpu" }:contiguous()
    local rows, columns = half.shape[1], half.shape[2]
    local mask = half:ne(0)
    local wide = (columns + 7) // 8 * 8
    local padded = mask:to "i32"
    if wide > columns then
      padded = ty.concat({ padded, ty.zeros({ rows, wide - columns }, { dtype = "i32" }) }, 1)
    end
    local bytes = (padded:reshape(rows, wide // 8, 8) * bits()):sum(2)
    return { values = half:masked_select(mask), bitmap = bytes:to "u8", starts = M.starts(mask), columns = columns }
  end)
end

--- The matrix of pack(), f16 [rows, columns]. Raises where values and bits do not fit each other.
---@param packed { values: Tensor, bitmap: Tensor, columns: integer }
---@return Tensor
function M.unpack(packed)
  local who = "prune.unpack"
  arguments.expect(who, "packed", packed, "a table")
  local values, bitmap, columns = packed.values, packed.bitmap, packed.columns
  arguments.expect(who, "columns", columns, "an integer >= 0")
  if not ty.is_tensor(values) or values.ndim ~= 1 or values.dtype ~= "f16" then
    arguments.fail("%s: values: expected f16 [n], got %s", who, arguments.describe(values))
  end
  if not ty.is_tensor(bitmap) or bitmap.ndim ~= 2 or bitmap.dtype ~= "u8" or bitmap.shape[2] ~= (columns + 7) // 8 then
    arguments.fail("%s: bitmap: expected u8 [rows, %d], got %s", who, (columns + 7) // 8, arguments.describe(bitmap))
  end
  return ty.no_grad(function()
    local rows = bitmap.shape[1]
    local mask = bitmap:to("i32"):unsqueeze(2):floor_div(bits()):bitwise_and(1):reshape(rows, -1)
    local beyond = mask.shape[2] - columns
    local count = mask:to("i64"):sum():item()
    if count ~= values:numel() or beyond > 0 and mask:narrow(1, columns, beyond):sum():item() > 0 then
      arguments.fail("%s: bitmap: expected %d bits within %d columns, got %d", who, values:numel(), columns, count)
    end
    mask = mask:narrow(1, 0, columns)
    if count == 0 then return ty.zeros({ rows, columns }, { dtype = "f16" }) end
    local place = (mask:to("i64"):flatten():cumsum(0) - 1):clamp(0)
    local spread = values:index_select(0, place):reshape(rows, columns)
    return ty.where(mask:to "bool", spread, ty.zeros({ 1 }, { dtype = "f16" }))
  end)
end

-- What pack() or csl() returned, or an error.
local function check_packed(who, packed)
  arguments.expect(who, "packed", packed, "a table")
  if not ty.is_tensor(packed.starts) or not (ty.is_tensor(packed.words) and math.tointeger(packed.rows)
    or ty.is_tensor(packed.values) and ty.is_tensor(packed.bitmap)) then
    arguments.fail("%s: packed: expected what prune.pack or prune.csl returns, got another table", who)
  end
  return packed
end

--- Bytes of a packed matrix in either form, but for where rows or tiles begin.
---@param packed table  of pack() or csl()
---@return integer
function M.bytes(packed)
  check_packed("prune.packed_bytes", packed)
  return packed.words and 4 * packed.words:numel() or 2 * packed.values:numel() + packed.bitmap:numel()
end

--- A matrix as tiled CSL: words i32 [nonzeros], a value in f16 and its place in the tile, column * 128 + row; starts
-- i64 [tiles + 1].
---@param weight Tensor  [rows, columns], which is rounded to f16
---@return { words: Tensor, starts: Tensor, rows: integer, columns: integer }
function M.csl(weight)
  arguments.expect("prune.csl", "weight", weight, "a tensor")
  if weight.ndim ~= 2 or not weight:is_floating_point() then
    arguments.fail("prune.csl: weight: expected a matrix of floats, got %s", arguments.describe(weight))
  end
  return ty.no_grad(function()
    local rows, columns = weight.shape[1], weight.shape[2]
    local down, across = (rows + TALL - 1) // TALL, (columns + WIDE - 1) // WIDE
    local whole = ty.zeros({ down * TALL, across * WIDE }, { dtype = "f16" })
    whole:narrow(0, 0, rows):narrow(1, 0, columns):copy_(weight:detach())
    local tiles = whole:reshape(down, TALL, across, WIDE):permute(0, 2, 3, 1):reshape(down * across, TALL * WIDE)
    local mask = tiles:ne(0)
    local halves = ty.io.from_bytes(ty.io.to_bytes(tiles:contiguous()), "i16", tiles.shape):to("i32")
    local words = halves:bitwise_and(0xffff) + (ty.arange(TALL * WIDE) * 0x10000):to "i32"
    return { words = words:masked_select(mask), starts = M.starts(mask), rows = rows, columns = columns }
  end)
end

--- x [..., columns] times a packed matrix, transposed: [..., rows].
---@param x Tensor
---@param packed table  of pack() or csl()
---@return Tensor
function M.product(x, packed)
  arguments.expect("prune.product", "x", x, "a tensor")
  check_packed("prune.product", packed)
  if packed.words then return ty.linear_csl(x, packed.words, packed.starts, packed.rows) end
  return ty.linear_bitmap(x, packed.values, packed.bitmap, packed.starts)
end

-- ---- layers ----

-- A linear layer whose weight is packed; its parts are buffers, so that they move with the model.
local compacted = surgery.wrapper { name = "Compact", field = "_compact",
  fields = { "values", "bitmap", "words", "starts" },
  forward = function()
    return function(self, x, residual, activation)
      local y
      if self.words then
        y = ty.linear_csl(x, self.words, self.starts, self._compact.rows)
      else
        y = ty.linear_bitmap(x, self.values, self.bitmap, self.starts)
      end
      return surgery.finish(self.bias and y + self.bias or y, residual, activation)
    end
  end,
  describe = function(state) return ("%.3f of the weights"):format(state.share) end }

local function compact(model, options)
  local who = "prune.compact"
  local o = arguments.read(who, options, { form = "bitmap", least = 0.2, targets = arguments.none },
    { form = '"bitmap" or "csl"', least = "a number in [0, 1]", targets = false })
  local report = {}
  for _, layer in ipairs(surgery.find(who, model, { targets = o.targets, head = false })) do
    local module = layer.module
    local weight = module.weight:detach()
    local share = weight:is_floating_point() and weight:ne(0):to("f32"):mean():item() or 1
    if not module.fan_in_fan_out and share <= 1 - o.least then
      local packed = M[o.form == "csl" and "csl" or "pack"](weight)
      for _, name in ipairs { "values", "bitmap", "words", "starts" } do
        if packed[name] then module:buffer(name, packed[name]:to { device = weight.device }) end
      end
      surgery.remove(module, "weight")
      compacted:wrap(module, { rows = weight.shape[1], columns = weight.shape[2], share = share, dtype = weight.dtype })
      report[#report + 1] = { name = layer.name, share = share, bytes = M.bytes(packed), dense = 2 * weight:numel() }
    end
  end
  ty.core.program.renew()
  return report
end

--- Packs the weights of a model's linear layers that have zeros, for running: f16, and no gradient for them. options:
-- form ("bitmap", or "csl"), least (0.2: the share of zeros that a layer must have), targets (which layers, as
-- nn.surgery.find has them; all but the head). Returns a list of { name, share, bytes, dense }: the share that is not
-- zero, and bytes packed and as f16.
---@param model Module
---@param options? { form?: "bitmap"|"csl", least?: number, targets?: string|function }
---@return { name: string, share: number, bytes: integer, dense: integer }[]
function M.compact(model, options) return nn.for_caller(compact, model, options) end

--- Gives packed layers dense weights again, rounded to f16 as they are. Returns the model.
---@param model Module
---@return Module
function M.expand(model)
  return nn.for_caller(function()
    for _, layer in ipairs(compacted:wrapped("prune.expand", model)) do
      local module = layer.module
      local state = compacted:state(module)
      local weight = module.words and ty.dense_csl(module.words, module.starts, state.rows, state.columns)
        or ty.dense_bitmap(module.values, module.bitmap, module.starts, state.columns)
      compacted:unwrap(module)
      module:parameter("weight", weight:to(state.dtype))
    end
    ty.core.program.renew()
    return model
  end)
end

--- Writes a model as its save() does, in f16, and matrices packed where that is smaller: in place of NAME there are
-- NAME.values and NAME.bitmap. prune.load() reads it.
---@param model LanguageModel
---@param path string  a folder
---@return integer bytes  of all tensors
function M.save(model, path)
  arguments.expect("prune.save", "model", model, "a module")
  arguments.expect("prune.save", "path", path, "a string")
  if not model.published_state then
    arguments.fail("prune.save: model: expected a network of tycho.models, got %s", arguments.describe(model))
  end
  local state, bytes = {}, 0
  for name, t in pairs(model:published_state()) do
    local half = t:is_floating_point() and t:detach():to { dtype = "f16", device = "cpu" } or t
    local packed = half.ndim == 2 and half:is_floating_point() and M.pack(half)
    if packed and M.bytes(packed) < 2 * half:numel() then
      state[name .. ".values"], state[name .. ".bitmap"] = packed.values, packed.bitmap
      bytes = bytes + M.bytes(packed)
    else
      state[name] = half
      bytes = bytes + half:numel() * (half:is_floating_point() and 2 or 8)
    end
  end
  ty.io.mkdir(path)
  ty.io.save_safetensors(path .. "/model.safetensors", state, { format = "pt" })
  for name, value in pairs(model:published_files()) do
    ty.io.write_atomic(path .. "/" .. name, ty.io.json_encode(value, { indent = 2 }) .. "\n")
  end
  return bytes
end

--- Puts matrices in the place of what save() packed in a state. shapes: the model's tensors by name.
---@param state table<string, Tensor>
---@param shapes table<string, Tensor>
---@return table<string, Tensor> state
---@return integer count  of matrices
function M.unpacked(state, shapes)
  local whole, count = {}, 0
  for name, t in pairs(state) do
    local base = name:match "^(.*)%.bitmap$"
    if base and shapes[base] and shapes[base].ndim == 2 then
      whole[base] = M.unpack { bitmap = t, values = state[base .. ".values"], columns = shapes[base].shape[2] }
      count = count + 1
    elseif not (name:match "%.values$" and state[(name:gsub("%.values$", ".bitmap"))]) then
      whole[name] = t
    end
  end
  return whole, count
end

return M
