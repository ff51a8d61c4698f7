-- Every name that README.md shows exists: modules, functions, classes, methods, folders, recipes.
local here = arg and arg[0]:match ".*/" or "tests/lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"

local text = ty.io.read(check.root .. "README.md")

-- What README calls the parts of the library and the modules.
local roots = { ty = ty }
for name in ("nn optim train data plot recipe"):gmatch "%a+" do roots[name] = ty[name] end
for _, name in ipairs(ty.io.listdir(check.root .. "modules")) do roots[name] = require("tycho." .. name) end

-- The code of the page: fenced blocks and what stands between backticks.
local code = {}
local prose = text:gsub("```(%a*)\n(.-)```", function(language, block)
  code[#code + 1] = { block = language == "lua", text = block }
  return ""
end)
for span in prose:gmatch "`([^`\n]+)`" do code[#code + 1] = { text = span } end

check.test("names of modules", function()
  local count = 0
  for name in text:gmatch 'require "(tycho[%w_.]*)"' do
    count = count + 1
    check.ok(pcall(require, name), ('require "%s"'):format(name))
  end
  for name in prose:gmatch "`(tycho%.[%w_]+)`" do
    count = count + 1
    check.ok(pcall(require, name), name)
  end
  check.ok(count >= 8, ("%d of them were found"):format(count))
end)

check.test("functions, classes and parts", function()
  local count = 0
  for _, piece in ipairs(code) do
    for path in piece.text:gmatch "%f[%w_.:\"/]([%a_][%w_]*%.[%w_.]+)" do
      local root, rest = path:match "^([%w_]+)%.(.+)$"
      local value = roots[root]
      if value and not piece.text:find("/" .. path, 1, true) then
        count = count + 1
        for key in rest:gmatch "[%w_]+" do
          -- What a class or a function has is not looked up.
          if type(value) ~= "table" then break end
          value = value[key]
        end
        check.ok(value ~= nil, path)
      end
    end
  end
  check.ok(count >= 15, ("%d of them were found"):format(count))
end)

check.test("methods", function()
  -- Objects of the kinds that README's examples make.
  local llm = require "tycho.llm"
  local model = llm.GPT2 { vocabulary = 8, context = 8, width = 8, layers = 1, heads = 1 }
  local tokenizer = ty.tokenizer.load(check.root .. "tests/fixtures/tokenizers/bert_cased.json")
  local objects = { model, tokenizer, ty.ones(1), ty.optim.AdamW(model:parameters(), { lr = 1 }),
    ty.data.DataLoader(ty.data.TensorDataset { x = ty.ones(2) }) }
  objects[#objects + 1] = require("tycho.diffusion").TextToImage(require("tycho.hub").pipeline(check.root ..
    "tests/fixtures/pipelines/sd15"))
  local vlm, folder = require "tycho.vlm", os.tmpname()
  os.remove(folder)
  ty.io.mkdir(folder)
  objects[#objects + 1] = vlm.gallery(folder, vlm.gallery_encoder(require("tycho.zoo").path "scene-clip"))
  os.remove(folder)
  objects[#objects + 1] = require("tycho.dist").RankGroup
  local count = 0
  for _, piece in ipairs(code) do
    for name in piece.text:gmatch "%f[%w_][%a_][%w_]*[%w_)%]]*:([%a_][%w_]*)%s*[%({\"]" do
      count = count + 1
      local found = false
      for _, object in ipairs(objects) do
        local ok, value = pcall(function() return object[name] end)
        found = found or ok and value ~= nil
      end
      check.ok(found or piece.text:find("function [%w_]+:" .. name), ":" .. name)
    end
  end
  check.ok(count >= 10, ("%d of them were found"):format(count))
end)

check.test("files and folders", function()
  local count = 0
  for path in text:gmatch "%f[%w_/.]([%w_]+/[%w_/.-]*)" do
    local top = path:match "^[^/]+"
    if ty.io.stat(check.root .. top) and top ~= "build" then
      count = count + 1
      check.ok(ty.io.stat(check.root .. path:gsub("[.]$", "")), path)
    end
  end
  check.ok(count >= 20, ("%d of them were found"):format(count))
end)

check.finish()
