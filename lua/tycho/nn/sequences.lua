--- Sequences of different lengths as one batch: pad_sequence.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local options = require "tycho.nn.options"

local M = {}

--- Sequences [t, ...] of different lengths as one tensor [n, longest, ...], with padding at their ends. options:
-- batch_first (true; false: [longest, n, ...]), padding_value (0). Their lengths are the second result: what the
-- recurrent layers take as `lengths`.
---@param sequences Tensor[]
---@param given? {batch_first: boolean, padding_value: number}
---@return Tensor padded
---@return Tensor lengths  i64 [n]
function M.pad_sequence(sequences, given)
  options.expect("pad_sequence", "sequences", sequences, "a list of tensors")
  local o = options.read("pad_sequence", given, { batch_first = true, padding_value = 0 },
    { padding_value = "a number" })
  local first = sequences[1]
  if not first then arguments.fail "pad_sequence: sequences: expected at least one, got an empty table" end
  local longest, lengths = 0, {}
  local function of_step(x) return table.concat(x.shape, ", ", 2) end
  for i, x in ipairs(sequences) do
    if x.ndim == 0 or x.ndim ~= first.ndim or of_step(x) ~= of_step(first) or x.dtype ~= first.dtype then
      arguments.fail("pad_sequence: sequences: expected tensors [t, ...] that differ in t alone, got "
        .. "[%s] %s and [%s] %s",
        table.concat(first.shape, ", "), first.dtype, table.concat(x.shape, ", "), x.dtype)
    end
    lengths[i] = x:size(0)
    longest = math.max(longest, lengths[i])
  end
  local rows = {}
  for i, x in ipairs(sequences) do
    local pads = {}
    for k = 1, 2 * x.ndim do pads[k] = 0 end
    pads[#pads] = longest - lengths[i]
    rows[i] = ty.pad(x, pads, "constant", o.padding_value)
  end
  return ty.stack(rows, o.batch_first and 0 or 1), ty.tensor(lengths, { dtype = "i64" })
end

return M
