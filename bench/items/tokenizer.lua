--- A tokenizer against huggingface's, on one core: encoding documents of the project's own sources with a byte-level
-- vocabulary of 16384 that was learnt from them. At least 5 MB a second.
local ty = require "tycho"

local root = assert(arg[0]:match "^(.*)/bench/[^/]*$")
local folder = root .. "/build/bench"

-- The text and the tokenizer, in files for the other side as well.
local function prepare()
  local parts = {}
  for _, directory in ipairs { "src/ops", "src/io", "src/lua", "src/autograd", "kernels/cpu/matmul",
    "kernels/cpu/convolution", "kernels/cpu/quantized", "kernels/cpu/norm", "lua/tycho/nn" } do
    local names = ty.io.listdir(root .. "/" .. directory)
    table.sort(names)
    for _, name in ipairs(names) do
      if name:match "%.[ch]$" or name:match "%.lua$" then
        parts[#parts + 1] = ty.io.read(root .. "/" .. directory .. "/" .. name)
      end
    end
  end
  local text = table.concat(parts)
  ty.io.mkdir(folder)
  ty.io.write_atomic(folder .. "/tokenizer.txt", text)
  local tok = ty.tokenizer.train(parts, { vocabulary = 16384, pattern = "llama3" })
  tok:save(folder .. "/tokenizer.json")
  local documents = {}
  for i = 1, #text, 8192 do documents[#documents + 1] = text:sub(i, i + 8191) end
  return tok, documents, #text
end

local encode = { name = "encode", threads = { 1 }, peer = { "encode", { size = 8192 } }, bars = { peer = 5 } }
function encode.setup()
  local tok, documents, bytes = prepare()
  encode.bars.most = bytes / 5e6
  return function()
    ty.scope(function() tok:encode_batch(documents, { pad = false }) end)
  end
end

return { encode }
