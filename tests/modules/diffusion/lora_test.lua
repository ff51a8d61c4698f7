-- LoRA files on pipelines: the pictures of diffusers (tests/fixtures/make_loras.py), strengths, several at once, fused
-- and taken out again; what does not fit.
local here = (arg and arg[0]:match ".*/" or "tests/modules/diffusion/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local scratch = dofile(here .. "scratch.lua")
local ty = require "tycho"
local diffusion, hub, peft = require "tycho.diffusion", require "tycho.hub", require "tycho.peft"

local lora = diffusion.lora
local root = check.root .. "tests/fixtures/"
local loras, folders = root .. "loras/", root .. "pipelines/"
local expected = ty.io.load_safetensors(loras .. "expected.safetensors")
local prompts = { "two red apples", "A fox on a hill, in the rain" }
local drawn = { -- as DRAWN of make_pipelines.py
  sd15 = { steps = 4, guidance = 3, negative = "blurry", height = 16, width = 16 },
  sdxl = { steps = 4, guidance = 3, height = 16, width = 24 },
  flux = { steps = 4, guidance = 3.5, height = 16, width = 24 },
}

local function painter(name)
  return diffusion.TextToImage(hub.pipeline(folders .. name, { dtype = "f32" }), { warn = function() end,
    length = name == "flux" and 20 or nil })
end

local function paint(p, name)
  local o = { noise = ty.io.load_safetensors(folders .. name .. "/expected.safetensors").noise }
  for key, value in pairs(drawn[name]) do o[key] = value end
  return p:paint(prompts, o)
end

local function psnr(a, b)
  local error_ = (a:to "f64" - b:to "f64"):square():mean():item()
  return error_ == 0 and math.huge or 10 * math.log(255 ^ 2 / error_, 10)
end

-- Whether a painter's pictures are those that latents decode to.
local function same(p, name, latents, what)
  local pictures, got = paint(p, name)
  local off = (got - latents):abs():max():item() / latents:abs():max():item()
  check.ok(off < 2e-4, ("%s: latents differ by %.2g"):format(what, off))
  local ratio = psnr(pictures, p:decode(latents))
  check.ok(ratio >= 60, ("%s: %.1f dB"):format(what, ratio))
end

local plain = {}
for name in pairs(drawn) do plain[name] = ty.io.load_safetensors(folders .. name .. "/expected.safetensors").latents end

for _, file in ipairs { "sd15_diffusers", "sd15_metadata", "sd15_kohya", "sd15_old", "sd15_peft", "sdxl_kohya",
  "flux_kohya", "flux_diffusers" } do
  check.test(file .. ": the pictures of diffusers; fused, switched off, taken out", function()
    local base = file:match "^[^_]+"
    local p = painter(base)
    local path = loras .. file .. (file == "sd15_peft" and "" or ".safetensors")
    local report = lora.load(p, path, { name = "x" })
    local network = base == "flux" and "transformer" or "unet"
    check.equal(report.name, "x")
    check.ok(report.layers[network] > 5)
    local words = { sd15_peft = 0, sdxl_kohya = 6 }
    check.equal(report.layers.text_encoder or 0, words[file] or 4, file)
    local want = expected[file .. ".latents"]
    same(p, base, want, file)
    check.equal(lora.strengths(p), { x = 1 })

    lora.without(p, function() same(p, base, plain[base], file .. " without") end)
    local before = p.network:state_dict()
    local name, weight
    for key, t in pairs(before) do
      if key:find "to_q%.weight$" and not key:find "lora" then name, weight = key, t:clone() end
    end
    lora.fuse(p)
    check.ok(p.network:state_dict()[name]:ne(weight):any():item(), "the weights changed")
    same(p, base, want, file .. " fused")
    lora.without(p, function() same(p, base, plain[base], file .. " fused, without") end)
    lora.unfuse(p)
    check.ok(p.network:state_dict()[name]:eq(weight):all():item(), "exactly the weights that were")
    same(p, base, want, file .. " unfused")

    lora.set(p, {})
    check.equal(lora.strengths(p), { x = 0 })
    same(p, base, plain[base], file .. " off")
    lora.set(p, { x = 1 })
    same(p, base, want, file .. " on")
    lora.remove(p)
    check.equal(lora.strengths(p), {})
    same(p, base, plain[base], file .. " removed")
    for _, key in ipairs { "lora_A", "_adapter" } do
      for _, module in p.network:named_modules() do check.equal(rawget(module, key), nil) end
    end
  end)
end

check.test("strengths and several files at once are diffusers'", function()
  local p = painter "sd15"
  local report = lora.load(p.pipeline, loras .. "sd15_diffusers.safetensors", { strength = 0.4 })
  check.equal(report.name, "sd15_diffusers")
  same(p, "sd15", expected["sd15_weak.latents"], "weak")
  lora.load(p, loras .. "sd15_old.safetensors", { name = "two", strength = 0.75 })
  lora.set(p, { sd15_diffusers = 0.5, two = 0.75 })
  same(p, "sd15", expected["sd15_two.latents"], "two")
  -- By component: the words alone, then the network alone, add up to what both had.
  lora.set(p, { two = { unet = 1, text_encoder = 0 } })
  local _, a = paint(p, "sd15")
  lora.set(p, { two = { text_encoder = 1, unet = 0 } })
  local _, b = paint(p, "sd15")
  for what, x in pairs { network = a, words = b } do
    check.ok((x - plain.sd15):abs():max():item() > 1e-2, what .. " alone changes the picture")
    check.ok((x - expected["sd15_old.latents"]):abs():max():item() > 1e-2, what .. " alone is not both")
  end
  lora.remove(p, "two")
  lora.set(p, { sd15_diffusers = 0.4 })
  same(p, "sd15", expected["sd15_weak.latents"], "one removed")
end)

local function written(name, change)
  local state = {}
  for key, t in pairs(ty.io.load(loras .. name .. ".safetensors")) do state[key] = t end
  change(state)
  local path = scratch.file(name .. "_changed.safetensors")
  ty.io.save_safetensors(path, state)
  return path
end

check.test("what does not fit is one clear error, and nothing is changed", function()
  local p = painter "sd15"
  local function fails(text, path, options) check.fails(function() lora.load(p, path, options) end, text) end
  fails("got one of which 28 of 28 tensors find no layer that they fit: transformer.single_transformer_blocks",
    written("flux_diffusers", function(state)
      for key in pairs(state) do
        if not key:find "^transformer" then state[key] = nil end
      end
    end))
  local other = written("sd15_diffusers", function(state)
    state["unet.mid_block.attentions.0.proj_in.lora_A.weight"] = ty.zeros(2, 5)
    state["unet.conv_out.lora_A.weight"] = ty.zeros(2, 4, 3, 3)
  end)
  local message = check.fails(function() lora.load(p, other) end,
    "expected a LoRA for this pipeline, got one of which 3 of ")
  for _, key in ipairs { "unet.conv_out.lora_A.weight", "unet.mid_block.attentions.0.proj_in.lora_A.weight",
    "unet.mid_block.attentions.0.proj_in.lora_B.weight" } do check.ok(message:find(key, 1, true), key) end
  for piece, kind in pairs { ["hada_w1_a"] = "LoHa", ["lokr_w1"] = "LoKr", dora_scale = "DoRA",
    ["lora_mid.weight"] = "LoCon with a middle factor" } do
    fails(("expected LoRA, with two factors for each layer, got %s: 1 tensors such as lora_unet_mid.%s"):format(kind,
      piece), written("sd15_kohya", function(state) state["lora_unet_mid." .. piece] = ty.zeros(1) end))
  end
  check.equal(lora.strengths(p), {})
  same(p, "sd15", plain.sd15, "unchanged")
  local path = loras .. "sd15_diffusers.safetensors"
  fails("lora.load: " .. scratch.file "nowhere" .. ": is not there", scratch.file "nowhere")
  fails("lora.load: strength: expected a finite number or a table, got \"x\"", path, { strength = "x" })
  fails("lora.load: strength.unet: expected a finite number, got \"x\"", path, { strength = { unet = "x" } })
  lora.load(p, path)
  fails("lora.load: name: expected one that is not loaded, got 'sd15_diffusers'", path)
  check.fails(function() lora.set(p, { x = 1 }) end, "lora.set: strengths: expected names that were loaded, got 'x'")
  check.fails(function() lora.remove(p, "x") end, "lora.remove: name: expected one that was loaded, got 'x'")
  check.fails(function() lora.unfuse(p) end, "lora.unfuse: pipeline: expected one whose LoRAs are fused, got one")
  lora.fuse(p)
  check.fails(function() lora.set(p, {}) end, "lora.set: pipeline: expected one whose LoRAs are not fused, got a fused")
  check.fails(function() lora.load({}, path) end,
    "lora.load: pipeline: expected a pipeline or a painter with a unet or a transformer, got an empty table")
  local own = painter "sd15"
  peft.lora(own.network, { targets = { "to_q" }, rank = 2 })
  check.fails(function() lora.load(own, path) end,
    "lora.load: pipeline: expected networks without an adapter, got one of tycho.peft on the network")
end)

check.test("adapters on convolutions: trained, saved, read, merged", function()
  ty.manual_seed(4)
  local model = painter("sd15").network
  peft.lora(model, { targets = { "conv1", "downsamplers.0.conv", "proj_in" }, rank = 2, alpha = 3 })
  local x, t = ty.randn(2, 4, 8, 8), ty.tensor { 3.0, 800.0 }
  local c = { text = { embeddings = ty.randn(2, 5, 8) } }
  local first = model(x, t, c)
  local opt = ty.optim.AdamW(peft.parameters(model), { lr = 1e-2 })
  for _ = 1, 3 do opt:step((model(x, t, c) - 1):square():mean()) end
  local y = model(x, t, c):detach()
  check.ok((y - first):abs():max():item() > 1e-3, "it learns")
  peft.save(model, scratch.file "conv")
  local again = painter("sd15").network
  peft.load(again, scratch.file "conv")
  check.close(again(x, t, c):tolist(), y:tolist(), 1e-5)
  peft.merge(again)
  check.close(again(x, t, c):tolist(), y:tolist(), 1e-4)
  peft.unmerge(again)
  check.equal(again(x, t, c):tolist(), y:tolist())
  local config = ty.io.load_json(scratch.file "conv" .. "/adapter_config.json")
  check.equal(config.peft_type, "LORA")
  -- The same folder for a whole pipeline.
  local p = painter "sd15"
  lora.load(p, scratch.file "conv")
  check.close(p.network(x, t, c):tolist(), y:tolist(), 1e-5)
end)

check.finish()
