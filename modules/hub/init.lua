--- Models as the world ships them: require "tycho.hub".
--
--     local hub = require "tycho.hub"
--     local model = hub.load "path"             -- a Hugging Face folder, weights beside their config.json, or GGUF
--     local tokenizer = hub.tokenizer "path"
--     local text = hub.chat.load("path"):render { { role = "user", content = "Hello" } }
--     hub.convert("path", "model.gguf", "q4_k")
--
-- What a file asks for is looked up in tycho.models. Files come from outside and are hostile until checked; nothing of
-- a checkpoint is ever run.
local loader = require "tycho.hub.load"

local M = {
  load = loader.load,
  tokenizer = loader.tokenizer,
  weights = loader.weights,
  assign = loader.assign,
}

-- name -> file, and what of it.
local files = { chat = { "chat" }, gguf = { "gguf" }, convert = { "gguf.writer", "convert" },
  save_gguf = { "gguf.writer", "save" } }

-- A file is read when its name is first asked for.
return setmetatable(M, { __index = function(self, name)
  local file = files[name]
  if not file then return nil end
  local value = require("tycho.hub." .. file[1])
  if file[2] then value = value[file[2]] end
  rawset(self, name, value)
  return value
end })
