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

--- The model of a folder as published ones are: config.json with weights, tokenizer, template of chats and
-- preprocessor_config.json. options: those of hub.load.
---@param path string
---@param options? table
---@return VisionChat
local function load(path, options)
  local who = "vlm.load"
  arguments.expect(who, "path", path, "a string")
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
  local list, text = pictures_of(messages), self.chat:render(messages)
  local marks = select(2, text:gsub(self.token:gsub("%p", "%%%0"), ""))
  if marks ~= #list then
    arguments.fail("VisionChat:inputs: messages: expected as many pictures as image tokens in the text, got %d and %d",
      #list, marks)
  end
  if #list == 0 then return self.tokenizer:encode(text):unsqueeze(0) end
  local pictures, sizes = self.process(list)
  pictures = pictures:to { device = self.model:device() }
  local counts, k = self.model:feature_counts(pictures, sizes), 0
  text = text:gsub(self.token:gsub("%p", "%%%0"), function(mark)
    k = k + 1
    return mark:rep(counts[k])
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
