--- Talking to a model that sees: its files' template of chats, tokenizer and image processor around the network.
--
--     local chat = vlm.load "path/of/llava"
--     print(chat:generate({ { role = "user", content = { { type = "image", image = "photo.jpg" },
--       { type = "text", text = "what is this?" } } } }))
local ty = require "tycho"
local arguments = require "tycho.arguments"
local hub = require "tycho.hub"
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
  local config = { image_processor_type = "CLIPImageProcessor", size = { shortest_edge = side },
    crop_size = { height = side, width = side }, image_mean = metadata["clip.vision.image_mean"],
    image_std = metadata["clip.vision.image_std"] }
  return setmetatable({ model = model, tokenizer = tokenizer, chat = hub.chat.new(template, variables),
    process = hub.processor(config), processor_config = config }, VisionChat)
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
  local self = setmetatable({ model = model, tokenizer = hub.tokenizer(path), chat = hub.chat.load(path),
    process = process }, VisionChat)
  self.token = self.tokenizer:token(model:image_token())
  if not self.token then
    arguments.fail("%s: %s: expected a tokenizer with the image token %d, got one of %d tokens", who, path,
      model:image_token(), self.tokenizer.size)
  end
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
  self.processor_config = config
  return self
end

-- All pictures of messages in their order, and the messages without them.
local function pictures_of(messages)
  local list = {}
  for i, message in ipairs(messages) do
    if type(message) == "table" and type(message.content) == "table" then
      for _, part in ipairs(message.content) do
        if type(part) == "table" and part.type == "image" then
          if part.image == nil then
            arguments.fail("VisionChat: message %d: expected image = a path or u8 [channels, h, w], got nil", i)
          end
          list[#list + 1] = part.image
        end
      end
    end
  end
  return list
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
local function spliced(self, text, counts)
  local ids, from, k = {}, 1, 0
  local function add(piece)
    if piece == "" then return end
    local list = self.tokenizer:encode(piece, { special = #ids == 0 }):tolist()
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

--- What the model gets of messages { { role, content } ... }, where content is a text or a list of parts, { type =
-- "text", text = string } and { type = "image", image = a path or u8 [channels, h, w] }: tokens i64 [1, t], a token for
-- each feature of a picture, and the pictures f32 [m, 3, h, w] (nil without any), of models that see tiles all of these
-- and third the pictures' sizes.
---@param messages table[]
---@return Tensor tokens
---@return Tensor? pictures
---@return Tensor? sizes
function VisionChat:inputs(messages)
  arguments.expect("VisionChat:inputs", "messages", messages, "a list of tables")
  local list = pictures_of(messages)
  local text = self.chat:render(self.token and messages or flattened(messages))
  local mark = self.token or MARK
  local marks = select(2, text:gsub(mark:gsub("%p", "%%%0"), ""))
  if marks ~= #list then
    arguments.fail("VisionChat:inputs: messages: expected as many pictures as image tokens in the text, got %d and %d",
      #list, marks)
  end
  if #list == 0 then return self.tokenizer:encode(text):unsqueeze(0) end
  local pictures, sizes = self.process(list)
  pictures = pictures:to { device = self.model:device() }
  local counts, k = self.model:feature_counts(pictures, sizes), 0
  if not self.token then return spliced(self, text, counts), pictures, sizes end
  text = text:gsub(self.token:gsub("%p", "%%%0"), function(found)
    k = k + 1
    return found:rep(counts[k])
  end)
  return self.tokenizer:encode(text):unsqueeze(0), pictures, sizes
end

--- The model's answer to messages, as VisionChat:inputs() takes them, as text. options: max_tokens (100), temperature
-- (0: the most likely token), top_k, top_p, seed, on_text (called with each piece of the answer as it comes).
---@param messages table[]
---@param options? table
---@return string
function VisionChat:generate(messages, options)
  local o = arguments.read("VisionChat:generate", options, { max_tokens = 100, temperature = 0, top_k = 0, top_p = 1.0,
    seed = 0, on_text = arguments.none }, { max_tokens = "an integer > 0", on_text = "a function" })
  local tokens, pictures, sizes = self:inputs(messages)
  local stream, parts, last = llm.stream(self.tokenizer), {}, self.model:end_tokens()
  local ends = {}
  for _, id in ipairs(type(last) == "table" and last or { last }) do ends[id] = true end
  local function say(text)
    if #parts == 0 then text = text:gsub("^%s+", "") end
    if text == "" then return end
    parts[#parts + 1] = text
    if o.on_text then o.on_text(text) end
  end
  self.model:generate(tokens:to { device = self.model:device() }, o.max_tokens, { temperature = o.temperature,
    top_k = o.top_k, top_p = o.top_p, seed = o.seed, pictures = pictures, sizes = sizes, on_token = function(_, token)
      if not ends[token] then say(stream(token)) end
    end })
  say(stream())
  return table.concat(parts)
end

return { load = load }
