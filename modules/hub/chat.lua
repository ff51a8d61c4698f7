--- Chats as the text that a model was trained on, by the template of its files.
--
--     local chat = llm.chat.load "path/of/a/folder"
--     local text = chat:render({ { role = "user", content = "Hello" } })
--     local tokens = tok:encode(text)
local ty = require "tycho"
local jinja = require "tycho.hub.jinja"

local arguments = require "tycho.arguments"
local expect = arguments.expect
local M = {}

--- A model's chat template, which turns a list of messages into the text or the tokens that it was trained on.
---@class Chat
local Chat = {}
Chat.__index = Chat

--- A chat by a Jinja template. variables: what every text gets: bos_token, eos_token and the like.
---@param template string
---@param variables? table<string, any>
---@return Chat
function M.new(template, variables)
  expect("chat.new", "template", template, "a string")
  expect("chat.new", "variables", variables, "a table or nil")
  return setmetatable({ compiled = jinja.compile(template), variables = variables or {} }, Chat)
end

--- The text of messages { { role = , content = }, ... }. options: add_generation_prompt (true: the answer begins),
-- tools, and whatever else the template knows. Errors of the template name its line.
---@param messages table[]
---@param options? table
---@return string text
function Chat:render(messages, options)
  expect("chat:render", "messages", messages, "a list of tables")
  expect("chat:render", "options", options, "a table or nil")
  if #messages == 0 then arguments.fail "chat:render: messages: expected at least one, got an empty table" end
  for i, message in ipairs(messages) do
    expect("chat:render", ("role of message %d"):format(i), message.role, "a string")
  end
  local variables = { messages = messages, add_generation_prompt = true }
  for _, source in ipairs { self.variables, options or {} } do
    for key, value in pairs(source) do variables[key] = value end
  end
  return self.compiled(variables)
end

-- A file's object, or nothing where there is none.
local function object(path)
  if not ty.io.stat(path) then return {} end
  local value = ty.io.load_json(path)
  if type(value) ~= "table" then
    arguments.fail("chat: %s: expected an object, got %s", path, arguments.describe(value))
  end
  return value
end

--- The chat of a published folder: chat_template.jinja, or chat_template in chat_template.json or
-- processor_config.json, where older files of models that see have it, or in tokenizer_config.json (where there are
-- several, the one called `name`, "default"). otherwise: the template where there is none, which is an error without
-- it.
---@param folder string
---@param name? string
---@param otherwise? string
---@return Chat
function M.load(folder, name, otherwise)
  expect("chat.load", "folder", folder, "a string")
  expect("chat.load", "name", name, "a string or nil")
  expect("chat.load", "otherwise", otherwise, "a string or nil")
  name = name or "default"
  local config = object(folder .. "/tokenizer_config.json")
  local file, template = folder .. "/chat_template.jinja", nil
  if ty.io.stat(file) then template = ty.io.read(file) end
  for _, other in ipairs { "chat_template.json", "processor_config.json" } do
    local own = template == nil and object(folder .. "/" .. other).chat_template
    if own and own ~= ty.io.null then template = own end
  end
  template = template or config.chat_template
  if type(template) == "table" then
    local found
    for _, one in ipairs(template) do
      if type(one) == "table" and one.name == name then found = one.template end
    end
    template = found
  end
  if template == nil or template == ty.io.null then template = otherwise end
  if type(template) ~= "string" then error(("chat: %s has no chat template"):format(folder), 2) end
  local variables = {}
  for key, value in pairs(config) do
    if key:find "_token$" then
      if type(value) == "table" then value = value.content end
      if type(value) == "string" then variables[key] = value end
    end
  end
  return M.new(template, variables)
end

return M
