--- Matrices with zeros, stored without them: a bit for each element, and the others one after another in f16. Of a
-- matrix with a share s of zeros that is 2 (1 - s) + 1/8 bytes for each element.
local ty = require "tycho"
local arguments = require "tycho.arguments"

local M = {}

local function bits() return ty.tensor({ 1, 2, 4, 8, 16, 32, 64, 128 }, { dtype = "i32" }) end

--- Packs a matrix. Column c of a row is bit c % 8 of its byte c // 8.
---@param weight Tensor  [rows, columns], which is rounded to f16
---@return { values: Tensor, bitmap: Tensor, columns: integer } packed  f16 [nonzeros] by rows; u8 [rows, columns / 8]
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
    return { values = half:masked_select(mask), bitmap = bytes:to "u8", columns = columns }
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

--- Bytes of a packed matrix.
function M.bytes(packed) return 2 * packed.values:numel() + packed.bitmap:numel() end

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
