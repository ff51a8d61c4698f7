-- Every model that ships: whole, small, quickly there, with a page, and with the same numbers on a GPU as on the CPU
-- (where there is one: the build's tests run this again on the emulated device).
local here = (arg and arg[0]:match ".*/" or "tests/modules/zoo/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local zoo = require "tycho.zoo"

local names = zoo.names()
local total, counted = 0, {} -- bytes of all files; a part that several models share is there once, links lead to it
local gpu = ty.device_available "cuda"

-- A small input of a network by its class, and the outputs that count.
local calls = {
  Llama = function(m, at) return m(at(ty.tensor { { 5, 17, 300, 41, 7 } })) end,
  AutoencoderKL = function(m, at) return (m(at(ty.linspace(-1, 1, 3 * 16 * 16):reshape(1, 3, 16, 16)))) end,
  CLIPModel = function(m, at)
    return (m(at(ty.tensor { { 0, 20, 30, 1 }, { 0, 9, 1, 1 } }),
      { pictures = at(ty.linspace(-1, 1, 3 * 64 * 64):reshape(1, 3, 64, 64)) }))
  end,
  Llava = function(m, at)
    local ids = {}
    for k = 1, 64 do ids[k] = m.config.image_token_index end
    table.move({ 20, 30, 40 }, 1, 3, 65, ids)
    return m(at(ty.tensor { ids }), { pictures = at(ty.linspace(-1, 1, 3 * 64 * 64):reshape(1, 3, 64, 64)) })
  end,
  ResNet = function(m, at)
    local c = m.config.num_channels
    return m(at(ty.linspace(-1, 1, c * 32 * 32):reshape(1, c, 32, 32)))
  end,
  ViTForImageClassification = function(m, at) return m(at(ty.linspace(-1, 1, 3 * 64 * 64):reshape(1, 3, 64, 64))) end,
  ActionModel = function(m, at)
    return m:encode { images = at(ty.linspace(-1, 1, 3 * 64 * 64):reshape(1, 3, 64, 64)),
      words = at(ty.tensor { { 20, 30, 40, 2, 0, 0, 0, 0, 0, 0, 0, 0 } }),
      states = at(ty.tensor { { 1.5, -1.4, -1.7, 0 } }) }.query
  end,
  UNet2DConditionModel = function(m, at)
    local c, width = m.config.in_channels, m.config.cross_attention_dim
    return m(at(ty.linspace(-1, 1, c * 8 * 8):reshape(1, c, 8, 8)), at(ty.tensor { 500.0 }), { text = {
      embeddings = at(ty.linspace(-1, 1, 4 * width):reshape(1, 4, width)) } })
  end,
  WanTransformer3DModel = function(m, at)
    local c, width = m.config.in_channels, m.config.text_dim
    return m(at(ty.linspace(-1, 1, c * 4 * 8 * 8):reshape(1, c, 4, 8, 8)), at(ty.tensor { 500.0 }), { text = {
      embeddings = at(ty.linspace(-1, 1, 4 * width):reshape(1, 4, width)) } })
  end,
  SD3Transformer2DModel = function(m, at)
    return m(at(ty.linspace(-1, 1, 4 * 8 * 8):reshape(1, 4, 8, 8)), at(ty.tensor { 500.0 }), { text = {
      embeddings = at(ty.linspace(-1, 1, 4 * 128):reshape(1, 4, 128)),
      pooled = at(ty.linspace(-1, 1, 128):reshape(1, 128)) } })
  end,
}

-- The networks of what zoo.load() gives, by name.
local function networks_of(model)
  if not model.components then return { [""] = model } end
  local list = {}
  for name, part in pairs(model.components) do
    if type(part) == "table" and part.parameters then list[name] = part end
  end
  return list
end

for _, name in ipairs(names) do
  check.test(name, function()
    local info = zoo.info(name)
    for _, file in pairs(ty.io.load_json(info.path .. "/checksums.json")) do
      local key = ("%d %s"):format(file.bytes, file.crc32)
      if not counted[key] then total, counted[key] = total + file.bytes, true end
    end
    for _, part in ipairs { "^# " .. name:gsub("%-", "%%-") .. ": ", "| measured | | bar | |",
      "recipes/zoo/" .. name:gsub("%-", "%%-") .. "%.lua %-%-publish" } do
      check.ok(info.page:find(part), name .. ": its page has no " .. part)
    end
    local best, model = math.huge, nil
    for _ = 1, 3 do
      local begin = os.clock()
      model = zoo.load(name)
      best = math.min(best, os.clock() - begin)
    end
    check.ok(best < 0.2, ("%s: took %.3f s to load"):format(name, best))
    for part, network in pairs(networks_of(model)) do
      local class = getmetatable(network).__name
      local call = calls[class]
      if part ~= "text_encoder" and part ~= "vae" then -- those are models of their own, or CLIP's
        check.ok(call, ("%s: how a %s is called is not said here"):format(name, class))
      end
      if call then
        local y = ty.no_grad(function() return call(network, function(x) return x end) end)
        check.ok(y:isfinite():all():item() and y:std():item() > 0, name .. ": outputs")
        if gpu then
          network:to "cuda"
          local other = ty.no_grad(function() return call(network, function(x) return x:to "cuda" end) end):to "cpu"
          local apart = (other - y):abs():max():item() / y:abs():max():item()
          check.ok(apart < 1e-4, ("%s: on a GPU the numbers are %.2g apart"):format(name, apart))
        end
      end
    end
  end)
end

check.test("all of them together are small", function()
  check.ok(#names > 0)
  check.ok(total < 60e6, ("%d bytes"):format(total))
end)

check.finish()
