-- Components of diffusers: loading and saving their folders, shards, older names, weights of half precision, the report
-- of what does not fit.
local here = (arg and arg[0]:match ".*/" or "tests/modules/hub/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local scratch = dofile(here .. "scratch.lua")
local ty = require "tycho"
local hub = require "tycho.hub"

local root = check.root .. "tests/fixtures/diffusers/"
local WEIGHTS = "diffusion_pytorch_model.safetensors"

-- A folder with a fixture's config, changed, and the files that write(path, state) makes of its tensors.
local count = 0
local function folder(name, write, change)
  count = count + 1
  local path = scratch.file("component" .. count)
  ty.io.mkdir(path)
  local config = ty.io.load_json(root .. name .. "/config.json")
  for key, value in pairs(change or {}) do config[key] = value end
  ty.io.save_json(path .. "/config.json", config)
  local state = {}
  for key, t in pairs(ty.io.load(root .. name .. "/" .. WEIGHTS)) do state[key] = t end
  write(path, state)
  return path
end

local function whole(path, state) ty.io.save_safetensors(path .. "/" .. WEIGHTS, state) end

local function same(a, b, what)
  local left, right = a:state_dict(), b:state_dict()
  local names = 0
  for key, t in pairs(left) do
    names = names + 1
    check.ok(right[key] and right[key].dtype == t.dtype and right[key]:eq(t):all():item(), what .. " " .. key)
  end
  for _ in pairs(right) do names = names - 1 end
  check.equal(names, 0, what)
end

local names = {}
for _, name in ipairs(ty.io.listdir(root)) do names[#names + 1] = name end
check.ok(#names >= 2)

for _, name in ipairs(names) do
  check.test(name .. ": what is saved is what was loaded, the config too", function()
    local model = hub.load(root .. name)
    check.equal({ model.training, model.config.unknown }, { false, {} })
    check.equal(model:parameters()[1].dtype, "bf16")
    local path = scratch.file(name)
    model:save(path)
    same(model, hub.load(path), name)
    local given, written = ty.io.load_json(root .. name .. "/config.json"), ty.io.load_json(path .. "/config.json")
    for key, value in pairs(given) do
      if key:sub(1, 1) ~= "_" or key == "_class_name" then
        check.equal(ty.io.json_encode(written[key]), ty.io.json_encode(value), name .. " " .. key)
      end
    end
    for key in pairs(written) do check.ok(given[key] ~= nil or not key:find "^_", name .. " " .. key) end
    -- Made from the config alone.
    local fresh = hub.load(root .. name, { weights = false })
    check.equal(fresh:count_parameters(), model:count_parameters())
    check.equal(fresh:parameters()[1].dtype, "f32")
    -- The weights alone.
    model:save(scratch.file(name .. ".safetensors"))
    local state = ty.io.load(scratch.file(name .. ".safetensors"))
    for key, t in pairs(model:state_dict()) do check.equal(state[key].shape, t.shape) end
  end)
end

check.test("shards with an index, half precision, PyTorch's names of attention before diffusers 0.16", function()
  local model = hub.load(root .. "autoencoder", { dtype = "f32" })
  local function parts(suffix)
    return function(path, state)
      local files, map = { {}, {} }, {}
      for key, t in pairs(state) do
        local i = key:find "^encoder" and 1 or 2
        files[i][key] = t
        map[key] = ("diffusion_pytorch_model%s-0000%d-of-00002.safetensors"):format(suffix, i)
      end
      for i, part in ipairs(files) do
        ty.io.save_safetensors(("%s/diffusion_pytorch_model%s-0000%d-of-00002.safetensors"):format(path, suffix, i),
          part)
      end
      ty.io.save_json(("%s/%s.index%s.json"):format(path, WEIGHTS, suffix), { metadata = {}, weight_map = map })
    end
  end
  same(model, hub.load(folder("autoencoder", parts ""), { dtype = "f32" }), "shards")
  same(model, hub.load(folder("autoencoder", parts ".fp16"), { dtype = "f32" }), "shards of a variant")
  local half = hub.load(folder("autoencoder", function(path, state)
    for key, t in pairs(state) do state[key] = t:to "f16" end
    ty.io.save_safetensors(path .. "/diffusion_pytorch_model.fp16.safetensors", state)
  end))
  check.equal(half:parameters()[1].dtype, "f16")
  local x = ty.randn(1, 3, 16, 16)
  local want, got = model:encode(x).mean, half:encode(x:to "f16").mean:to "f32"
  check.ok((got - want):abs():max():item() < 0.02 * want:abs():max():item(), "half precision")

  local old = { to_q = "query", to_k = "key", to_v = "value", ["to_out.0"] = "proj_attn" }
  local changed = 0
  local path = folder("autoencoder", function(to, state)
    local renamed = {}
    for key, t in pairs(state) do
      for new, was in pairs(old) do
        local begin, rest = key:match("^(.*attentions%.0%.)" .. new:gsub("%.", "%%.") .. "(%.%a+)$")
        if begin then
          key, changed = begin .. was .. rest, changed + 1
        end
      end
      renamed[key] = t
    end
    whole(to, renamed)
  end)
  check.equal(changed, 16)
  same(model, hub.load(path, { dtype = "f32" }), "older names")
end)

check.test("what does not fit is one clear error", function()
  local message = check.fails(function()
    hub.load(folder("autoencoder", function(path, state)
      state["encoder.conv_in.weight"] = nil
      state["decoder.conv_in.weight"] = ty.ones { 3, 3 }
      state["encoder.more.weight"] = ty.ones { 1 }
      whole(path, state)
    end))
  end, "the weights do not fit the model")
  for _, text in ipairs { "missing (1):\n    encoder.conv_in.weight", "unexpected (1):\n    encoder.more.weight",
    "decoder.conv_in.weight: the model has [16, 4, 3, 3], the file [3, 3]" } do
    check.ok(message:find(text, 1, true), text)
  end
  check.fails(function() hub.load(folder("autoencoder", whole, { _class_name = "AutoencoderXL" })) end,
    "_class_name 'AutoencoderXL' is not known; there are AutoencoderKL")
  check.fails(function() hub.load(folder("autoencoder", whole, { norm_num_groups = "4" })) end,
    "config.json: AutoencoderKL: config key 'norm_num_groups' must be a positive integer, got 4")
  check.fails(function() hub.load(folder("autoencoder", function() end)) end,
    "has none of model.safetensors, diffusion_pytorch_model.safetensors and their like")
  -- What a later version of diffusers has besides is said, and the file still read.
  local later = hub.load(folder("autoencoder", whole, { quant_conv_bias = true }))
  check.equal(later.config.unknown, { "quant_conv_bias" })
end)

check.finish()
