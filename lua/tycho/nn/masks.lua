--- Masks of attention as PyTorch's modules take them, where true means left out, as the one mask that attention takes
-- here (and PyTorch's scaled_dot_product_attention), where true means seen.
local ty = require "tycho"
local options = require "tycho.nn.options"

local M = {}

--- Options of modules that take such masks, for options.read.
M.defaults = { mask = options.none, causal = false, attn_mask = options.none, key_padding_mask = options.none }
M.kinds = { mask = "a tensor", causal = "a boolean", attn_mask = "a tensor", key_padding_mask = "a tensor" }

-- A mask in which true is left out as one in which true is seen; numbers stay what they are.
local function seen(t) return t.dtype == "bool" and t:logical_not() or t end

local function both(a, b)
  if not a or not b then return a or b end
  if a.dtype == "bool" and b.dtype == "bool" then return a:logical_and(b) end
  local function numbers(t, other)
    if t.dtype ~= "bool" then return t end
    return ty.where(t, 0.0, -math.huge):to(other.dtype)
  end
  return numbers(a, b) + numbers(b, a)
end

--- One mask of: mask (true: seen), attn_mask ([t, s], [b * heads, t, s] or [b, heads, t, s], true: left out, or numbers
-- that are added), key_padding_mask ([b, s], true: left out, or numbers). nil where there is none.
---@param who string
---@param o table  with mask, attn_mask and key_padding_mask
---@param batch integer
---@param heads integer
---@param queries integer
---@param keys integer
---@return Tensor|nil
function M.combine(who, o, batch, heads, queries, keys)
  local mask, attn, padding = o.mask, o.attn_mask, o.key_padding_mask
  if attn then
    if attn.ndim < 2 or attn:size(-2) ~= queries or attn:size(-1) ~= keys then
      options.fail("%s: attn_mask: expected [..., %d, %d], queries and keys, got %s", who, queries, keys,
        options.describe(attn))
    end
    if attn.ndim == 3 then
      if attn:size(0) ~= batch * heads then
        options.fail("%s: attn_mask: expected [%d, t, s], one for each head of each row, got %s", who, batch * heads,
          options.describe(attn))
      end
      attn = attn:reshape(batch, heads, attn:size(1), attn:size(2))
    elseif attn.ndim ~= 2 and attn.ndim ~= 4 then
      options.fail("%s: attn_mask: expected [t, s] or [batch * heads, t, s], got %s", who, options.describe(attn))
    end
    mask = both(mask, seen(attn))
  end
  if padding then
    if padding.ndim ~= 2 or padding:size(0) ~= batch or padding:size(1) ~= keys then
      options.fail("%s: key_padding_mask: expected [%d, %d], true where there is padding, got %s", who, batch, keys,
        options.describe(padding))
    end
    mask = both(mask, seen(padding):reshape(batch, 1, 1, -1))
  end
  return mask
end

--- The mask [n, n] of numbers that are added so that a position sees itself and those before it: 0 and -infinity.
---@param n integer
---@param given? { dtype: Dtype, device: Device }
---@return Tensor
function M.square_subsequent(n, given)
  options.expect("generate_square_subsequent_mask", "n", n, "an integer >= 1")
  local o = options.read("generate_square_subsequent_mask", given, { dtype = "f32", device = "cpu" })
  return ty.full({ n, n }, -math.huge, { dtype = o.dtype, device = o.device }):triu(1)
end

return M
