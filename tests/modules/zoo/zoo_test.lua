-- Models that ship: written with page and checksums, found by name, refused when damaged.
local here = (arg and arg[0]:match ".*/" or "tests/modules/zoo/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local llm, zoo = require "tycho.llm", require "tycho.zoo"
local program = require "tycho.program"

local root = os.tmpname()
os.remove(root)
ty.io.mkdir(root .. "/zoo")

local function quoted(text) return "'" .. text:gsub("'", "'\\''") .. "'" end

-- What a program of one line prints where the zoo is `folder`.
local function run(folder, code)
  local pipe <close> = assert(io.popen(("TYCHO_ZOO=%s %s -e %s 2>&1"):format(quoted(folder), quoted(program.executable),
    quoted(code))))
  return pipe:read "a"
end

local function match(text, pattern) check.ok(text:find(pattern), pattern .. " is not in: " .. text) end

ty.manual_seed(3)
local model = llm.Llama { vocab_size = 300, hidden_size = 32, intermediate_size = 48, num_hidden_layers = 1,
  num_attention_heads = 2, max_position_embeddings = 32 }
local recipe = { name = "zoo/small-lm", root = root, seed = 0,
  head = { title = "A small model", claim = "it is small", system = "a Llama", paper = "none",
    notes = "Nothing else." } }
local rows = { { claim = "figure", values = { 0.5, 0.7 }, bar = 0.55 } }

check.test("publishing writes the files, the page and the checksums, and replaces what was there", function()
  for _ = 1, 2 do
    local path = zoo.publish(recipe, rows, function(folder)
      model:clone():to("f16"):save(folder)
    end)
    check.equal(path, root .. "/zoo/small-lm")
  end
  check.ok(not ty.io.exists(root .. "/zoo/small-lm.partial"))
  local page = ty.io.read(root .. "/zoo/small-lm/README.md")
  for _, text in ipairs { "# small%-lm: A small model", "It is small.", "recipes/zoo/small%-lm.lua", "0.6 ± 0.14",
    ">= 0.55 | pass, within noise", "Nothing else." } do
    check.ok(page:find(text), text)
  end
  local loaded = require("tycho.hub").load(root .. "/zoo/small-lm", { dtype = "f32" })
  local tokens = ty.tensor { { 1, 2, 3 } }
  check.close(loaded(tokens):tolist(), model:eval()(tokens):tolist(), 5e-3)
end)

check.test("a part that another model has too is a link to its file", function()
  local function with(noise, parts) -- writes parts of 100 kB or more beside the model
    return function(folder)
      model:clone():to("f16"):save(folder)
      ty.io.mkdir(folder .. "/vae")
      ty.io.write_atomic(folder .. "/vae/part.bin", noise:rep(parts))
    end
  end
  local function linked(path) return os.execute("test -L " .. quoted(root .. "/zoo/" .. path)) == true end
  local function publish(name, write)
    recipe.name = "zoo/" .. name
    zoo.publish(recipe, rows, write)
  end
  publish("other-lm", with("tenletters", 15000))
  publish("third-lm", with("tenletters", 15000))
  check.equal({ linked "other-lm/vae/part.bin", linked "third-lm/vae/part.bin" }, { false, true })
  check.equal(ty.io.read(root .. "/zoo/third-lm/vae/part.bin"), ("tenletters"):rep(15000))
  publish("other-lm", with("tenletters", 15000)) -- what others lead to stays a file
  check.equal({ linked "other-lm/vae/part.bin", linked "third-lm/vae/part.bin" }, { false, true })
  publish("other-lm", with("otherwords", 15000)) -- what led to it keeps what it was
  check.equal({ linked "other-lm/vae/part.bin", linked "third-lm/vae/part.bin" }, { false, false })
  check.equal(ty.io.read(root .. "/zoo/third-lm/vae/part.bin"), ("tenletters"):rep(15000))
  publish("other-lm", with("tenletters", 15000)) -- and it leads to that file instead
  check.equal({ linked "other-lm/vae/part.bin", linked "third-lm/vae/part.bin" }, { true, false })
  publish("other-lm", with("otherwords", 15000)) -- nothing is written through a link
  check.equal(ty.io.read(root .. "/zoo/third-lm/vae/part.bin"), ("tenletters"):rep(15000))
  publish("other-lm", with("tenletters", 15000))
  publish("third-lm", with("otherwords", 15000))
  check.equal({ linked "other-lm/vae/part.bin", linked "third-lm/vae/part.bin" }, { false, false })
  check.equal(ty.io.read(root .. "/zoo/other-lm/vae/part.bin"), ("tenletters"):rep(15000))
  publish("other-lm", with("otherword", 3)) -- small ones are not worth it
  publish("third-lm", with("otherword", 3))
  check.equal(linked "third-lm/vae/part.bin", false)
  os.execute(("rm -r %s %s"):format(quoted(root .. "/zoo/other-lm"), quoted(root .. "/zoo/third-lm")))
  recipe.name = "zoo/small-lm"
end)

check.test("of a model that was measured and not trained the page alone is written", function()
  local folder = root .. "/zoo/small-lm"
  local page, sums = ty.io.read(folder .. "/README.md"), ty.io.read(folder .. "/checksums.json")
  recipe.measured = folder
  local function never() error "wrote files" end
  check.equal(zoo.publish(recipe, rows, never), folder)
  check.equal(ty.io.read(folder .. "/README.md"), page)
  zoo.publish(recipe, { { claim = "figure", values = { 0.25 }, bar = 0.55 } }, never)
  check.ok(ty.io.read(folder .. "/README.md"):find("0.25 | >= 0.55 | FAIL", 1, true))
  check.equal(ty.io.read(folder .. "/checksums.json"), sums)
  recipe.measured = root .. "/other"
  ty.io.mkdir(root .. "/other")
  ty.io.write_atomic(root .. "/other/checksums.json", "{}")
  check.fails(function() zoo.publish(recipe, rows, never) end, "%-%-publish with %-%-base: expected the model in ")
  recipe.measured, recipe.quick = nil, true
  check.fails(function() zoo.publish(recipe, rows, never) end, "%-%-publish: expected a full run, got one with")
  recipe.quick = nil
end)

check.test("models are loaded by name, in single precision", function()
  local text = run(root .. "/zoo", [[local zoo = require "tycho.zoo"
    local m = zoo.load "small-lm"
    print(table.concat(zoo.names(), " "), m:parameters()[1].dtype, m.training, zoo.tokenizer "small-lm",
      zoo.load("small-lm", { dtype = "f16" }):parameters()[1].dtype, zoo.info("small-lm").bytes > 10000)]])
  check.equal(text, "small-lm\tf32\tfalse\tnil\tf16\ttrue\n")
end)

check.test("a version is another when the files are others, and the same when they are written again", function()
  local function published(m)
    zoo.publish(recipe, rows, function(folder) m:clone():to("f16"):save(folder) end)
    return run(root .. "/zoo", [[io.write(require "tycho.zoo".version "small-lm")]])
  end
  local first, other = published(model), model:clone()
  ty.no_grad(function() other.lm_head.weight:fill_(0.25) end)
  check.ok(first:find "^%x%x%x%x%x%x%x%x$", first)
  check.ok(published(other) ~= first)
  check.equal(published(model), first)
  match(run(root .. "/zoo", [[require "tycho.zoo".version "smal-lm"]]), "zoo.version: no model 'smal%-lm' ships")
end)

check.test("what is not there or damaged is one clear error", function()
  local load = [[require("tycho.zoo").load "%s"]]
  match(run(root .. "/zoo", load:format "smal-lm"),
    "no model 'smal%-lm' ships; there are small%-lm; did you mean small%-lm")
  match(run(root .. "/zoo", load:format "../zoo/small-lm"), "no model")
  match(run(root .. "/nothing", load:format "small-lm"), "there are no models that ship in .*TYCHO_ZOO")
  local file = root .. "/zoo/small-lm/model.safetensors"
  local bytes = ty.io.read(file)
  ty.io.write_atomic(file, bytes:sub(1, -2) .. string.char(bytes:byte(-1) ~ 1))
  match(run(root .. "/zoo", load:format "small-lm"),
    "zoo.load: .*small%-lm is damaged: model.safetensors is not as")
  ty.io.write_atomic(file, bytes:sub(1, 1000))
  match(run(root .. "/zoo", load:format "small-lm"), "model.safetensors is not as it was written")
  ty.io.remove(file)
  match(run(root .. "/zoo", load:format "small-lm"), "model.safetensors .*got no file")
  ty.io.remove(root .. "/zoo/small-lm/checksums.json")
  match(run(root .. "/zoo", load:format "small-lm"), "has no checksums.json")
  check.fails(function() zoo.publish({ name = "llm/other" }, rows, print) end, "recipe: expected one of recipes/zoo")
end)

os.execute("rm -r " .. quoted(root))
check.finish()
