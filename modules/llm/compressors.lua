--- How many bits compressors take for a text: what language models have to beat.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local ngram = require "tycho.llm.ngram"

local expect = arguments.expect
local M = {}

-- Bytes of a text by gzip -9, or where there is none by the deflate of NPZ files, at level 6; and which of them it was.
local function packed_size(path, text)
  local quoted = path:gsub("'", "'\\''")
  ty.io.write_atomic(path, text)
  local done = os.execute(("gzip -9nc '%s' > '%s.gz' 2> /dev/null"):format(quoted, quoted))
  local packed = path .. (done and ".gz" or ".npz")
  if not done then ty.io.save_npz(packed, { text = ty.io.from_bytes(text, "u8") }, { compress = true }) end
  local size = ty.io.stat(packed).size
  for _, file in ipairs { path, path .. ".gz", path .. ".npz" } do
    if ty.io.exists(file) then ty.io.remove(file) end
  end
  return size, done and "gzip -9" or "deflate (there is no gzip)"
end

--- Bits that gzip -9 takes for a text: alone, or what it adds behind another text, whichever is less. path: of a file
-- that may be written and is removed again.
---@param path string
---@param before string
---@param text string
---@return integer bits
---@return string name  of the compressor: deflate where there is no gzip
function M.gzip(path, before, text)
  expect("compressors.gzip", "path", path, "a string")
  expect("compressors.gzip", "before", before, "a string")
  expect("compressors.gzip", "text", text, "a string")
  local alone, name = packed_size(path, text)
  return 8 * math.min(alone, packed_size(path, before .. text) - packed_size(path, before)), name
end

--- Bits that the best n-gram model takes for texts, the order being chosen by these texts themselves, which favours it.
-- sets: { training =, held_out = } lists of strings of symbols of `width` bytes. options: width (1), vocabulary (256),
-- orders (a list), each(order, bits) (called for every order).
---@param sets {training: string[], held_out: string[]}
---@param options {width: integer, vocabulary: integer, orders: integer[], each: fun(order: integer, bits: number)}
---@return number bits
---@return integer order
function M.best_ngram(sets, options)
  expect("compressors.best_ngram", "sets", sets, "a table")
  local o = arguments.read("compressors.best_ngram", options,
    { width = 1, vocabulary = 256, orders = { 3, 4, 5, 6 }, each = arguments.none },
    { orders = "a list of integers >= 1", each = "a function" })
  local least, best = math.huge, nil
  for _, order in ipairs(o.orders) do
    local bits = ngram.train(sets.training, { order = order, width = o.width, vocabulary = o.vocabulary })
      :bits(sets.held_out)
    if o.each then o.each(order, bits) end
    if bits < least then least, best = bits, order end
  end
  return least, best
end

return M
