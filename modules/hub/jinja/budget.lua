--- What rendering a template may use: it comes from outside, and a few dozen characters of it could ask for gigabytes
-- or for years. Whatever makes a text or a list counts it here before it is made, whatever goes over one counts that as
-- work. Counts are of a whole rendering; nothing is given back.
local M = {}

M.TEXT = 1 << 24  -- bytes of one text
M.BYTES = 1 << 28 -- of all texts and lists
M.STEPS = 5000000 -- operations, and pieces of 64 bytes that they read
local ITEM, TABLE = 16, 64

local bytes, steps = 0, 0

local function fail(most, unit)
  error(("template: rendering takes more than the %d %s allowed"):format(most, unit), 0)
end

--- Counts an operation that reads `size` bytes or items (0).
function M.step(size)
  steps = steps + 1 + (size or 0) // 64
  if steps > M.STEPS then fail(M.STEPS, "steps") end
end

--- Counts a text of `size` bytes that is about to be made.
function M.text(size)
  if size > M.TEXT then
    error(("template: a text of more than %d bytes"):format(M.TEXT), 0)
  end
  bytes = bytes + size
  if bytes > M.BYTES then fail(M.BYTES, "bytes of texts and lists") end
  M.step(size)
end

--- Counts a list or dictionary of `count` entries that is about to be made.
function M.list(count)
  bytes = bytes + TABLE + ITEM * count
  if bytes > M.BYTES then fail(M.BYTES, "bytes of texts and lists") end
  M.step(count)
end

--- Returns fn(...), counted from 0.
function M.run(fn, ...)
  local before_bytes, before_steps = bytes, steps
  bytes, steps = 0, 0
  local result = table.pack(pcall(fn, ...))
  bytes, steps = before_bytes, before_steps
  if not result[1] then error(result[2], 0) end
  return table.unpack(result, 2, result.n)
end

return M
