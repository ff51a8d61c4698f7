-- The reference that ./run docs makes: every op and every public function is described, once, with the text that `help`
-- prints; links and anchors fit.
local here = arg and arg[0]:match ".*/" or "tests/lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local documented = require "tycho.documented"
local help = require "tycho.help"
local names = require "tycho.names"
local sources = require "tycho.sources"

if not ty.io.exists(check.root .. "src/ops/ops.def") then -- a bundle
  check.finish()
  return
end

local reference = dofile(check.root .. "docs/make_reference.lua")
local pages, bare = reference.collect()

local items, on_page = {}, {}
for _, page in ipairs(pages) do
  for _, section in ipairs(page.sections) do
    for _, item in ipairs(section.items) do
      items[#items + 1] = item
      check.ok(not on_page[item.name], item.name .. " stands on one page")
      on_page[item.name] = page.id
    end
  end
end

check.test("everything is documented", function()
  check.equal(table.concat(bare, " "), "", "ops and functions without a text above their definition")
  check.ok(pcall(reference.demand, {}), "nothing is missing")
  check.fails(function() reference.demand { "nn.Nothing" } end, "no documentation: nn.Nothing")
end)

check.test("everything is there", function()
  for _, op in ipairs(ty.core.ops()) do
    check.equal(on_page["ty." .. op.name] ~= nil, not op.flags.INTERNAL, "the op " .. op.name)
  end
  for _, entry in ipairs(names.all()) do
    local inherited = entry.alias and entry.name:find ":"
    check.ok(inherited or on_page[documented.full_name(entry)], entry.name)
  end
  check.ok(#items > 1500, #items .. " of them")
  for name, page in pairs { ["ty.softmax"] = "ops-networks", ["ty.nn.Linear"] = "nn", ["ty.randn"] = "random",
    ["Optimizer:step"] = "optim", ["llm.load"] = "llm", ["ty.memory.set_budget"] = "machine", ["ty.grad"] = "tensors",
    ["Tensor:backward"] = "tensors", ["peft.lora"] = "peft", ["ty.io.load_csv"] = "io", ["Tokenizer:encode"] = "data",
    ["ty.stats.median"] = "profile", ["ty.plot.line"] = "plot", ["ty.train.fit"] = "train", ["ty.det"] = "tensors" } do
    check.equal(on_page[name], page, "the page of " .. name)
  end
end)

check.test("help finds the same text", function()
  for i = 1, #items, 7 do
    local item = items[i]
    local text = help.text(item.name)
    local told = true
    for _, line in ipairs(item.found.text) do told = told and text:find(line, 1, true) ~= nil end
    check.ok(told, ("help %s: %s"):format(item.name, told and "" or text))
  end
end)

check.test("signatures, arguments and defaults", function()
  local found = documented.of_function(ty.nn.Conv2d.init, "nn.Conv2d", true)
  check.equal(found.signatures[1],
    "nn.Conv2d(inputs: integer, outputs: integer, kernel: integer|integer[], options?: table)")
  check.equal(table.concat(found.options, ", "),
    'algorithm = "library", bias = true, dilation = 1, groups = 1, padding = 0, stride = 1')
  check.equal(table.concat(sources.defaults(ty.plot.grid), ", "):match "gap = 2, range = { %-1, 1 }, invert = false",
    "gap = 2, range = { -1, 1 }, invert = false")
  for _, item in ipairs(items) do -- kinds of config keys are no defaults
    check.ok(not table.concat(item.found.options, " "):find('{ "', 1, true), item.name)
  end
  local parts = documented.parts { "Text.", "@param f? fun(x: Tensor, y: table<string, any>): Tensor what it does",
    "and more", "@return table<string, Tensor>, integer all of them", "@field [1] integer the first" }
  check.equal(parts.text[1], "Text.")
  check.equal(parts.params[1].name, "f?")
  check.equal(parts.params[1].type, "fun(x: Tensor, y: table<string, any>): Tensor")
  check.equal(parts.params[1].text, "what it does and more")
  check.equal(parts.returns[1].type, "table<string, Tensor>, integer")
  check.equal(parts.returns[1].text, "all of them")
  check.equal(parts.fields[1].name, "[1]")
  check.ok(help.text("abs"):find("Also called ty.absolute.", 1, true), "other names of an op")
end)

check.test("anchors and links", function()
  local link = reference.linker(pages, ".html")
  local anchors, links = {}, {}
  for _, page in ipairs(pages) do
    local text = reference.markdown(page, link)
    for id in text:gmatch '<h[23] id="([^"]+)"' do
      local full = page.id .. ".html#" .. id
      check.ok(not anchors[full], full .. " is there once")
      anchors[full] = true
    end
    for address in text:gmatch "%]%((#?[%w%-]*[^%s()]*)%)" do
      links[#links + 1] = address:sub(1, 1) == "#" and page.id .. ".html" .. address or address
    end
  end
  local count = 0
  for _, address in ipairs(links) do
    if address:find "^[%w-]+%.html#" then
      count = count + 1
      check.ok(anchors[address], "a link to " .. address)
    end
  end
  check.ok(count > 300, count .. " links")
end)

check.finish()
