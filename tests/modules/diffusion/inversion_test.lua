-- Words of a painter's own: files of embeddings as diffusers has them (tests/fixtures/make_loras.py), and learning
-- them.
local here = (arg and arg[0]:match ".*/" or "tests/modules/diffusion/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local scratch = dofile(here .. "scratch.lua")
local ty = require "tycho"
local diffusion, hub = require "tycho.diffusion", require "tycho.hub"

local inversion = diffusion.inversion
local root = check.root .. "tests/fixtures/"
local expected = ty.io.load_safetensors(root .. "loras/expected.safetensors")
local prompts = { "a <mug> and red apples", "a fox" }
local drawn = { -- as DRAWN of make_pipelines.py
  sd15 = { steps = 4, guidance = 3, negative = "blurry", height = 16, width = 16 },
  sdxl = { steps = 4, guidance = 3, height = 16, width = 24 },
}

local function painter(name, length)
  local p = diffusion.TextToImage(hub.pipeline(root .. "pipelines/" .. name, { dtype = "f32" }), { length = length,
    warn = function() end })
  p.process.objective.drop = 0
  return p
end

local function paint(p, name)
  local o = { noise = ty.io.load_safetensors(root .. "pipelines/" .. name .. "/expected.safetensors").noise }
  for key, value in pairs(drawn[name]) do o[key] = value end
  local _, latents = p:paint(prompts, o)
  return latents
end

for name in pairs(drawn) do
  check.test(name .. ": the word of a file draws what diffusers draws; written again it is the same", function()
    local file = root .. "loras/" .. name .. "_word.safetensors"
    local p = painter(name)
    local plain = paint(p, name)
    check.equal(inversion.load(p, file, { token = name == "sdxl" and "<mug>" or nil }), "<mug>")
    local want, got = expected[name .. "_word.latents"], paint(p, name)
    check.ok((got - want):abs():max():item() <= 2e-4 * want:abs():max():item(), name)
    check.ok((got - plain):abs():max():item() > 1e-2, name .. ": the word means something")
    inversion.save(p, "<mug>", scratch.file(name .. ".safetensors"))
    local a, b = ty.io.load(file), ty.io.load(scratch.file(name .. ".safetensors"))
    for key, t in pairs(a) do check.equal(b[key]:tolist(), t:tolist(), key) end
    -- The pipeline with the word is written and read as any other.
    hub.save_pipeline(scratch.file(name), p.pipeline)
    local again = diffusion.TextToImage(hub.pipeline(scratch.file(name)), { warn = function() end })
    check.ok(again.tokenizer:id "<mug>" == p.tokenizer:id "<mug>" and again.tokenizer:id "<mug>" ~= nil)
    again.prompts.words["<mug>"] = p.prompts.words["<mug>"]
    check.ok((paint(again, name) - want):abs():max():item() <= 2e-4 * want:abs():max():item(), name .. " read again")
  end)
end

check.test("a word is learnt, and nothing else changes", function()
  for name, length in pairs { sd15 = false, sdxl = false, flux = 20 } do
    local p = painter(name, length or nil)
    ty.manual_seed(2)
    local picture = ty.randint(0, 256, { 3, 16, 16 }):to "u8"
    local set = { captions = { "a <mug>" }, picture = function() return picture end }
    local before = {}
    for key, t in pairs(p.network:state_dict()) do before[key] = t:clone() end
    local text = p.text_encoder.text_model.embeddings.token_embedding.weight:clone()
    local losses = inversion.train(p, set, { token = "<mug>", start = "red", vectors = 2, steps = 1, lr = 1e-9 })
    check.equal(#losses, 1)
    local function measured()
      local z, sum = p:encode(picture:unsqueeze(0)), 0
      ty.manual_seed(5)
      ty.no_grad(function()
        for _ = 1, 12 do
          sum = sum + p.process.objective:loss(p.network, z, p:condition({ "a <mug>" }, { height = 16, width = 16,
            guidance = 3.5 })):item()
        end
      end)
      return sum
    end
    local first = measured()
    inversion.train(p, set, { token = "<mug>", steps = 60, lr = 5e-2 })
    check.ok(measured() < first, ("%s: from %.4f to %.4f"):format(name, first, measured()))
    for key, t in pairs(p.network:state_dict()) do check.ok(t:eq(before[key]):all():item(), key) end
    local now = p.text_encoder.text_model.embeddings.token_embedding.weight
    check.equal(now.shape[1], text.shape[1] + 2)
    check.ok(now:narrow(0, 0, text.shape[1]):eq(text):all():item(), "the other words")
    check.equal(getmetatable(p.text_encoder.text_model.embeddings.token_embedding).__name, "Embedding")
    check.ok(p.network:parameters()[1].requires_grad)
  end
end)

check.test("what is wrong is one clear error", function()
  local p = painter "sd15"
  local function wrong(text, call) check.fails(call, text) end
  wrong("inversion.add: rows: expected one tensor for each of 1 text encoders, got 0",
    function() inversion.add(p, "<a>", {}) end)
  wrong("inversion.add: rows[1]: expected [1, 8], got a tensor [1, 5]",
    function() inversion.add(p, "<a>", { ty.zeros(1, 5) }) end)
  wrong("inversion.add: token: expected a word, got \"a b\"",
    function() inversion.add(p, "a b", { ty.zeros(1, 8) }) end)
  inversion.add(p, "<a>", { ty.zeros(1, 8) })
  wrong("inversion.add: token: expected one that the tokenizer does not have, got '<a>'",
    function() inversion.add(p, "<a>", { ty.zeros(1, 8) }) end)
  wrong("inversion.save: token: expected a word that was added, got '<b>'",
    function() inversion.save(p, "<b>", scratch.file "b.safetensors") end)
  wrong("expected embeddings for 1 text encoders, got clip_g [1, 6], clip_l [1, 8]",
    function() inversion.load(p, root .. "loras/sdxl_word.safetensors") end)
  ty.io.save_safetensors(scratch.file "wide.safetensors", { ["<c>"] = ty.zeros(1, 9) })
  wrong("expected embeddings of 8 numbers, as the text encoder has them, got <c> [1, 9]",
    function() inversion.load(p, scratch.file "wide.safetensors") end)
  wrong("nowhere is not there", function() inversion.load(p, scratch.file "nowhere") end)
  wrong("inversion.add: painter: expected one with a text encoder of CLIP's kind, got none",
    function() inversion.add(painter("pixart", 20), "<a>", {}) end)
  local set = { captions = { "a mug" }, picture = function() return ty.zeros(3, 16, 16) end }
  wrong("inversion.train: set.captions[1]: expected a caption with <mug>, got \"a mug\"",
    function() inversion.train(p, set, { token = "<mug>" }) end)
  wrong("inversion.train: token: expected a string, got nil", function() inversion.train(p, set) end)
end)

check.finish()
