--- Models as the world ships them: require "tycho.hub".
--
--     local hub = require "tycho.hub"
--     local model = hub.load "path"             -- a folder of transformers or diffusers, weights in it, or GGUF
--     local tokenizer = hub.tokenizer "path"
--     local unet = hub.pipeline("path").components.unet   -- a folder of diffusers with model_index.json
--     local drawer = hub.load "sd_xl_base.safetensors"    -- a checkpoint in one file, with its authors' names
--     local text = hub.chat.load("path"):render { { role = "user", content = "Hello" } }
--     hub.convert("path", "model.gguf", "q4_k")
--     local pictures = hub.processor "path" { "photo.jpg" }                -- as the model wants them
--     local clips, grids, seconds = hub.video_processor "path"({ frames }, { fps = 2 })
--     local llava = hub.mmproj.load("mmproj.gguf", hub.load "model.gguf")   -- pictures beside a language model
--     local network = hub.load "model.onnx"               -- any ONNX file: it runs and trains
--     hub.save_onnx(network, inputs, "other.onnx")
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

return require "tycho.lazy" (M, { chat = "tycho.hub.chat", gguf = "tycho.hub.gguf",
  processor = "tycho.hub.processor", video_processor = "tycho.hub.video_processor", mmproj = "tycho.hub.gguf.mmproj",
  pipeline = { "tycho.hub.pipeline", "load" }, save_pipeline = { "tycho.hub.pipeline", "save" },
  save_onnx = { "tycho.hub.onnx.writer", "save" },
  convert = { "tycho.hub.gguf.writer", "convert" }, save_gguf = { "tycho.hub.gguf.writer", "save" } }, "tycho.hub")
