--- Talking to a model that sees: its files' template of chats, tokenizer and image processor around the network.
--
--     local chat = vlm.load "path/of/llava"
--     print(chat:generate({ { role = "user", content = { { type = "image", image = "photo.jpg" },
--       { type = "text", text = "what is this?" } } } }))
--     print(chat:generate({ { role = "user", content = { { type = "video", video = frames, fps = 2 },
--       { type = "text", text = "what happens?" } } } }))                       -- Qwen2-VL and Qwen2.5-VL
local ty = require "tycho"
local arguments = require "tycho.arguments"
local hub = require "tycho.hub"
local generate = require "tycho.llm.generate"
local llm = require "tycho.llm"

--- A model that sees, with all that is between it and messages: template of chats, tokenizer, image processor.
---@class VisionChat
---@field model LanguageModel
---@field tokenizer Tokenizer
local VisionChat = {}
VisionChat.__index = VisionChat
VisionChat.__name = "VisionChat"

-- What stands for a picture in the text that a template makes where no token does.
local MARK = "<__media__>"

-- What models are asked in that have learnt no chats and whose files have no template: PaliGemma's pictures, the
-- beginning, one text, the end of a line.
local prompts = {
  paligemma = [[
{%- if messages | length != 1 -%}{{ raise_exception('a PaliGemma takes one message') }}{%- endif -%}
{%- set content = messages[0].content -%}
{%- if content is string -%}{{ bos_token + content }}{%- else -%}
{%- for part in content if part.type == 'image' -%}{{ image_token }}{%- endfor -%}{{ bos_token }}
{%- for part in content if part.type == 'text' -%}{{ part.text }}{%- endfor -%}
{%- endif -%}{{ '\n' }}]],
}

-- A language model in a GGUF file and the mmproj file that belongs to it, as llama.cpp's multimodal tools take them.
local function of_gguf(who, path, mmproj, template, options)
  if not mmproj then
    arguments.fail("%s: %s: expected the option mmproj, the file with the network of pictures, got nil", who, path)
  end
  local model, metadata = hub.mmproj.load(mmproj, hub.load(path, options))
  local tokenizer, _, own = hub.tokenizer(path), ty.io.load_gguf(path)
  if not tokenizer then arguments.fail("%s: %s: expected a file with a tokenizer, got none", who, path) end
  template = template or own["tokenizer.chat_template"]
  if type(template) ~= "string" then
    arguments.fail("%s: %s has no template of chats: expected one as the option template", who, path)
  end
  local variables, side = {}, model.vision_tower.config.image_size
  for _, name in ipairs { "bos", "eos", "unk", "pad" } do
    local id = ty.tokenizer.fields(tokenizer)[name]
    variables[name .. "_token"] = id and tokenizer:token(id) or nil
  end
  local pinpoints = model.config.image_grid_pinpoints -- of models that see tiles
  local config = { image_processor_type = pinpoints and "LlavaNextImageProcessor" or "CLIPImageProcessor",
    size = { shortest_edge = side }, crop_size = { height = side, width = side }, image_grid_pinpoints = pinpoints,
    image_mean = metadata["clip.vision.image_mean"], image_std = metadata["clip.vision.image_std"] }
  return setmetatable({ model = model, tokenizer = tokenizer, chat = hub.chat.new(template, variables),
    process = hub.processor(config), processor_config = config }, VisionChat)
end

-- An error where the settings of a processor and of the model's network of pictures are not the same, though a picture
-- might go through.
local function agree(at, model, config, file)
  local function same(name, own, other)
    if own == other then return end
    arguments.fail("%s: %s says %s %s, the model's config %s", at, file, name, own, other)
  end
  local visual = model.visual and model.visual.config
  if visual then
    same("patch_size", config.patch_size or 14, visual.patch_size)
    same("merge_size", config.merge_size or 2, visual.spatial_merge_size)
    same("temporal_patch_size", config.temporal_patch_size or 2, visual.temporal_patch_size)
  end
  local own, other = config.image_grid_pinpoints, model.config.image_grid_pinpoints
  if own and other then same("image_grid_pinpoints", ty.io.json_encode(own), ty.io.json_encode(other)) end
end

--- The model of a folder as published ones are: config.json with weights, tokenizer, template of chats and
-- preprocessor_config.json; or of a GGUF file. options: those of hub.load, and of GGUF files mmproj (the file with the
-- network of pictures) and template (of chats, where the file has none).
---@param path string
---@param options? table
---@return VisionChat
local function load(path, options)
  local who = "vlm.load"
  arguments.expect(who, "path", path, "a string")
  arguments.expect(who, "options", options, "a table or nil")
  local rest, mmproj, template = {}, nil, nil
  for key, value in pairs(options or {}) do
    if key == "mmproj" then mmproj = arguments.expect(who, "mmproj", value, "a string")
    elseif key == "template" then template = arguments.expect(who, "template", value, "a string")
    else rest[key] = value end
  end
  if path:find "%.gguf$" then return of_gguf(who, path, mmproj, template, rest) end
  if mmproj then arguments.fail("%s: mmproj: goes with a GGUF file, got %s", who, path) end
  options = rest
  local model = hub.load(path, options)
  if not model.picture_features then
    arguments.fail("%s: %s: expected a model that sees pictures, got a %s", who, path, getmetatable(model).__name)
  end
  local process, config = hub.processor(path)
  local tokenizer = hub.tokenizer(path)
  if not tokenizer then arguments.fail("%s: %s: expected a folder with a tokenizer, got none", who, path) end
  local self = setmetatable({ model = model, tokenizer = tokenizer, process = process, path = path,
    chat = hub.chat.load(path, nil, prompts[model.model_type]) }, VisionChat)
  self.video_token = model.video_token and self.tokenizer:token(model:video_token()) or nil
  self.token = self.tokenizer:token(model:image_token())
  if not self.token then
    arguments.fail("%s: %s: expected a tokenizer with the image token %d, got one of %d tokens", who, path,
      model:image_token(), self.tokenizer.size)
  end
  local variables = self.chat.variables
  variables.image_token = variables.image_token or self.token
  local bos = ty.tokenizer.fields(tokenizer).bos
  variables.bos_token = variables.bos_token or bos and tokenizer:token(bos) or nil
  -- What a picture becomes has to be what the model takes.
  local made, sizes = process { ty.zeros({ 3, 8, 8 }, { dtype = "u8" }) }
  if model.vision_tower then
    local side, shape = model.vision_tower.config.image_size, made.shape
    local height, width = type(side) == "table" and side[1] or side, type(side) == "table" and side[2] or side
    if #shape ~= 4 then
      arguments.fail("%s: %s: preprocessor_config.json makes patches, the model takes pictures of %d x %d", who, path,
        height, width)
    elseif shape[3] ~= height or shape[4] ~= width then
      arguments.fail("%s: %s: preprocessor_config.json makes pictures of %d x %d, the model takes %d x %d", who, path,
        shape[3], shape[4], height, width)
    end
  end
  local ok, problem = pcall(ty.no_grad, model.picture_features, model, made:to { device = model:device() },
    { sizes = sizes })
  if not ok then
    arguments.fail("%s: %s: preprocessor_config.json makes what the model does not take: %s", who, path, problem)
  end
  agree(who .. ": " .. path, model, config, "preprocessor_config.json")
  self.processor_config = config
  return self
end

local kinds = { image = "a path or u8 [channels, h, w]", video = "u8 [frames, channels, h, w] or a list of pictures" }

-- What messages show of a kind, "image" or "video", in their order: and of clips, how many frames a second they have.
local function shown(messages, kind)
  local list, rates = {}, {}
  for i, message in ipairs(messages) do
    if type(message) == "table" and type(message.content) == "table" then
      for _, part in ipairs(message.content) do
        if type(part) == "table" and part.type == kind then
          if part[kind] == nil then
            arguments.fail("VisionChat: message %d: expected %s = %s, got nil", i, kind, kinds[kind])
          end
          list[#list + 1] = part[kind]
          rates[#list] = part.fps
        end
      end
    end
  end
  return list, rates
end

-- Messages whose parts are one text each, with a mark in the place of pictures: for templates that know texts alone.
local function flattened(messages)
  local list = {}
  for i, message in ipairs(messages) do
    local content = type(message) == "table" and message.content
    if type(content) == "table" then
      local parts = {}
      for k, part in ipairs(content) do
        parts[k] = type(part) == "table" and (part.type == "image" and MARK or part.text) or tostring(part)
      end
      content = table.concat(parts, "\n")
    end
    list[i] = { role = type(message) == "table" and message.role or nil, content = content }
  end
  return list
end

-- Tokens of a text with marks, in the place of the k-th one as many of pictures as it has features.
local function spliced(self, text, counts, special)
  local ids, from, k = {}, 1, 0
  local function add(piece)
    if piece == "" then return end
    local list = self.tokenizer:encode(piece, { special = special and #ids == 0 }):tolist()
    table.move(list, 1, #list, #ids + 1, ids)
  end
  while true do
    local first, last = text:find(MARK, from, true)
    add(text:sub(from, (first or 0) - 1))
    if not first then break end
    k = k + 1
    for _ = 1, counts[k] do ids[#ids + 1] = self.model:image_token() end
    from = last + 1
  end
  return ty.tensor({ ids }, { dtype = "i64" })
end

-- Whether a text gets the tokens that a tokenizer puts around all texts: not where the template began it already,
-- before or behind the pictures.
local function unbegun(self, text)
  local bos = self.chat.variables.bos_token
  if type(bos) ~= "string" or bos == "" then return true end
  while self.token and text:sub(1, #self.token) == self.token do text = text:sub(#self.token + 1) end
  return text:sub(1, #bos) ~= bos
end

-- A text with the token in the place of what is shown as often as it has features. what: for errors.
local function repeated(text, token, what, list, counts)
  local pattern, k = token:gsub("%p", "%%%0"), 0
  local marks = select(2, text:gsub(pattern, ""))
  if marks ~= #list then
    arguments.fail("VisionChat:inputs: messages: expected as many %ss as %s tokens in the text, got %d and %d",
      what == "video" and "clip" or "picture", what, #list, marks)
  end
  if not counts then return text end
  return (text:gsub(pattern, function(found)
    k = k + 1
    return found:rep(counts[k])
  end))
end

--- What the model gets of messages { { role, content } ... }, where content is a text or a list of parts, { type =
-- "text", text = string }, { type = "image", image = a path or u8 [channels, h, w] } and, of models that see clips,
-- { type = "video", video = u8 [frames, channels, h, w] or a list of pictures, fps = frames a second (24) }: tokens i64
-- [1, t], a token for each feature of a picture, the pictures f32 [m, 3, h, w] (nil without any), of models that see
-- tiles or patches all of these and third the pictures' sizes; and fourth the clips (nil without any), { videos,
-- video_sizes, video_seconds }, as the model's generate() and forward() take them.
---@param messages table[]
---@return Tensor tokens
---@return Tensor? pictures
---@return Tensor? sizes
---@return table? clips
function VisionChat:inputs(messages)
  arguments.expect("VisionChat:inputs", "messages", messages, "a list of tables")
  arguments.expect("VisionChat:inputs", "messages", messages, "a list of tables")
  local list = shown(messages, "image")
  local clips, rates = shown(messages, "video")
  if #clips > 0 and not self.video_token then
    arguments.fail("VisionChat:inputs: messages: expected no clips, which a %s does not see, got %d",
      getmetatable(self.model).__name, #clips)
  end
  local text = self.chat:render(self.token and messages or flattened(messages))
  local special = unbegun(self, text)
  text = repeated(text, self.token or MARK, "image", list)
  if self.video_token then text = repeated(text, self.video_token, "video", clips) end
  local device, pictures, sizes, seen = self.model:device(), nil, nil, nil
  if #list > 0 then
    pictures, sizes = self.process(list)
    pictures = pictures:to { device = device }
    local counts = self.model:feature_counts(pictures, sizes)
    if not self.token then return spliced(self, text, counts, special), pictures, sizes end
    text = repeated(text, self.token, "image", list, counts)
  end
  if #clips > 0 then
    if not self.process_clips then
      local process, config = hub.video_processor(self.path)
      agree("VisionChat:inputs: " .. self.path, self.model, config, "video_preprocessor_config.json")
      self.process_clips = process
    end
    local videos, grids, seconds = self.process_clips(clips, { fps = rates })
    seen = { videos = videos:to { device = device }, video_sizes = grids, video_seconds = seconds }
    text = repeated(text, self.video_token, "video", clips, self.model:feature_counts(videos, grids))
  end
  return self.tokenizer:encode(text, { special = special }):unsqueeze(0), pictures, sizes, seen
end

--- The tokens that end an answer, as a set.
---@return table<integer, boolean>
function VisionChat:ends() return generate.ends(self.model) end

--- The model's answer to messages, as VisionChat:inputs() takes them, as text. options: max_tokens (100), temperature
-- (0: the most likely token), top_k, top_p, seed, on_text (called with each piece of the answer as it comes).
---@param messages table[]
---@param options? table
---@return string
function VisionChat:generate(messages, options)
  local o = arguments.read("VisionChat:generate", options, { max_tokens = 100, temperature = 0, top_k = 0, top_p = 1.0,
    seed = 0, on_text = arguments.none }, { max_tokens = "an integer > 0", on_text = "a function" })
  local tokens, pictures, sizes, clips = self:inputs(messages)
  local stream, parts, ends = llm.stream(self.tokenizer), {}, self:ends()
  local function say(text)
    if #parts == 0 then text = text:gsub("^%s+", "") end
    if text == "" then return end
    parts[#parts + 1] = text
    if o.on_text then o.on_text(text) end
  end
  local how = { temperature = o.temperature, top_k = o.top_k, top_p = o.top_p, seed = o.seed, pictures = pictures,
    sizes = sizes, on_token = function(_, token)
      if not ends[token] then say(stream(token)) end
    end }
  for key, value in pairs(clips or {}) do how[key] = value end
  self.model:generate(tokens:to { device = self.model:device() }, o.max_tokens, how)
  say(stream())
  return table.concat(parts)
end

return { load = load }
