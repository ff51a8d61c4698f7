--- Tokenizers against huggingface's, on one core: encoding the project's own sources, learning from them.
local ty = require "tycho"

local root = arg[0]:match "^(.*)/bench/[^/]*$"
local folder = root .. "/build/bench"

-- The text and a tokenizer that was learnt from it, in files for both sides.
local function prepare()
  local parts = {}
  for _, directory in ipairs { "src/ops", "src/io", "src/lua", "src/autograd", "kernels/cpu", "lua/tycho/nn" } do
    for _, name in ipairs(ty.io.listdir(root .. "/" .. directory)) do
      if name:match "%.[chl]u?a?$" then parts[#parts + 1] = ty.io.read(root .. "/" .. directory .. "/" .. name) end
    end
  end
  local text = table.concat(parts)
  local path, model = folder .. "/tokenizer.txt", folder .. "/tokenizer.json"
  ty.io.mkdir(folder)
  ty.io.write_atomic(path, text)
  local tok = ty.tokenizer.train(parts, { vocabulary = 16384, pattern = "llama3" })
  tok:save(model)
  local list = {} -- documents, as a data set has them
  for i = 1, #text, 8192 do list[#list + 1] = text:sub(i, i + 8191) end
  return tok, list, parts
end

return {
  { name = "encode/llama3", threads = { 1 }, peer = { "encode", {} }, bars = { peer = 5 },
    setup = function()
      local tok, list = prepare()
      return function() ty.scope(function() tok:encode_batch(list, { pad = false }) end) end
    end },
  { name = "train/16384", threads = { 1 }, peer = { "train", { vocabulary = 16384 } }, bars = { peer = 1 },
    setup = function()
      local _, _, parts = prepare()
      return function() ty.tokenizer.train(parts, { vocabulary = 16384, pattern = "llama3" }) end
    end },
}
