-- An answer about a picture
-- claim: an answer that comes token by token is the one that the model gives without a cache
-- system: a model that sees pictures, published weights or one of the zoo
-- paper: Liu et al. 2023, "Visual Instruction Tuning"
-- time: seconds
--
-- ./run recipes/vlm/chat.lua --image photo.png --prompt "what is this?"
-- ./run recipes/vlm/chat.lua --model model.gguf --mmproj mmproj.gguf --image photo.png
-- ./run recipes/vlm/chat.lua --model path/of/qwen2-vl --video folder/of/frames --fps 2 --prompt "what happens?"
local ty = require "tycho"
local datasets, vlm, zoo = require "tycho.datasets", require "tycho.vlm", require "tycho.zoo"

local r = ty.recipe.declare {
  args = {
    { "model", "scene-vlm", "a folder with config.json and weights, a GGUF file, or the name of a model of the zoo" },
    { "mmproj", "", "of a GGUF file: the file with the network of pictures" },
    { "image", "", "a PNG, JPEG or WebP file (none: a scene that is drawn)" },
    { "video", "", "a folder of such files, the frames of a clip by their names, for models that see clips" },
    { "fps", 2.0, "frames a second that the clip has" },
    { "prompt", "what does the picture show?", "what is asked about it" },
    { "max_tokens", 60, "of the answer at most", quick = 12 },
    { "temperature", 0.0, "0 takes the most likely token" },
    { "top_p", 1.0, "only the fewest tokens that together have this probability" },
  },
}
local args = r.args

local path = args.model
if not path:find "%.gguf$" and not ty.io.stat(path .. "/config.json") then path = zoo.path(path) end
local chat = vlm.load(path, { device = r.device, dtype = "f32", mmproj = args.mmproj ~= "" and args.mmproj or nil })

local image, parts = args.image, {}
if args.video ~= "" then
  local frames, names = {}, ty.io.listdir(args.video)
  table.sort(names)
  for _, name in ipairs(names) do
    local ending = (name:match "%.(%w+)$" or ""):lower()
    if ({ png = true, jpg = true, jpeg = true, webp = true })[ending] then
      frames[#frames + 1] = args.video .. "/" .. name
    end
  end
  parts[1] = { type = "video", video = frames, fps = args.fps }
elseif image == "" then
  local item = datasets.load("scenes", { split = "validation", fields = { "image", "caption" } }):get(r.seed)
  image = item.image
  ty.plot.grid(image:unsqueeze(0), { columns = 1 }):save(r:path "scene.png")
  r:say("a scene: %s", item.caption)
end

if image ~= "" then parts[#parts + 1] = { type = "image", image = image } end
parts[#parts + 1] = { type = "text", text = args.prompt }
local messages = { { role = "user", content = parts } }
local answer = chat:generate(messages, { max_tokens = args.max_tokens, temperature = args.temperature,
  top_p = args.top_p, seed = r.seed, on_text = function(text)
    io.stdout:write(text)
    io.stdout:flush()
  end })
io.stdout:write "\n"

-- The most likely answer again, each token from the whole text before it.
local tokens, pictures, sizes, clips = chat:inputs(messages)
local greedy = chat:generate(messages, { max_tokens = args.max_tokens })
local all, ends = tokens:to { device = r.device }, chat:ends()
local seen = { pictures = pictures, sizes = sizes }
for key, value in pairs(clips or {}) do seen[key] = value end
for _ = 1, args.max_tokens do
  local id = ty.no_grad(function() return chat.model(all, seen):select(1, all.shape[2] - 1):argmax(-1) end)
  if ends[id:item()] then break end
  all = ty.concat({ all, id:reshape(1, 1) }, 1)
end
local count = all.shape[2] - tokens.shape[2]
local whole = count > 0 and chat.tokenizer:decode(all:select(0, 0):narrow(0, tokens.shape[2], count)) or ""
r.metrics.answer, r.metrics.tokens = answer, count

os.exit(r:finish { { claim = "answers that are the same without a cache",
  measured = whole:gsub("^%s+", "") == greedy and 1 or 0, bar = 1 } })
