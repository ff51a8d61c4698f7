-- What painters of scenes and clips share: what is on top in cells as labels, captions left out, the text encoder that
-- learns as well, a layer that says what is where, and weights put into a painter.
local here = (arg and arg[0]:match ".*/" or "tests/modules/zoo/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local datasets, diffusion, models, zoo = require "tycho.datasets", require "tycho.diffusion", require "tycho.models",
  require "tycho.zoo"

local judge, painters = zoo.judge, zoo.painter

check.test("cells of scenes: shares of pixels by object and look, in short and spread", function()
  local set = zoo.scenes.set("training", { "owner", "boxes", "scene" }, { objects = { 1, 2 } })
  local batch = set:batch { 0, 1, 2, 3 }
  local shares, numbers, colours = judge.tops(batch, 8)
  check.equal({ shares.shape, numbers.shape, colours.shape }, { { 4, 64, 3 }, { 4, 3 }, { 4, 3 } })
  check.close(shares:sum(2):tolist(), ty.ones(4, 64):tolist(), 1e-6)
  local objects, looks = judge.spread(shares, numbers, colours)
  local none = #datasets.scenes.objects
  for i, scene in ipairs(batch.scene) do
    -- The pixels of each object, counted one by one.
    local owner = batch.owner[i - 1]
    for j, object in ipairs(scene.objects) do
      local own = 0
      for _, other in ipairs(scene.objects) do own = own + (other.object == object.object and 1 or 0) end
      if own == 1 then
        local area = owner:eq(j - 1):to("f32"):mean():item()
        check.close(objects[i - 1]:select(1, object.object):mean():item(), area, 1e-5)
        local look = object.colour and datasets.scenes.tints[object.colour] or 0
        check.ok(looks[i - 1]:select(1, look):mean():item() >= area - 1e-5)
      end
    end
    check.close(objects[i - 1]:select(1, none):mean():item(), owner:lt(0):to("f32"):mean():item(), 1e-5)
  end
  -- Who says the labels themselves is right up to their own entropy; who says nothing is not.
  local right = ty.concat({ objects, looks }, 2):clamp(1e-9):log()
  check.ok(judge.cell_loss(right, objects, looks):item() < judge.cell_loss(right * 0, objects, looks):item() / 4)
end)

-- A painter of scenes, of a small network.
local function small()
  ty.manual_seed(3)
  local network = models.UNet2DConditionModel { sample_size = 16, in_channels = 4, out_channels = 4,
    layers_per_block = 1, block_out_channels = { 8, 16 }, down_block_types = { "DownBlock2D", "CrossAttnDownBlock2D" },
    up_block_types = { "CrossAttnUpBlock2D", "UpBlock2D" }, attention_head_dim = 4, norm_num_groups = 8,
    cross_attention_dim = 128, use_linear_projection = true, resnet_time_scale_shift = "scale_shift" }
  return diffusion.TextToImage(painters.pipeline({ device = "cpu", args = { length = 24 } }, "unet", network, {
    _class_name = "DDIMScheduler", num_train_timesteps = 1000, prediction_type = "sample", clip_sample = false,
    beta_schedule = "squaredcos_cap_v2", timestep_spacing = "trailing" }))
end

check.test("tokens that are left out are those of no words", function()
  local painter = small()
  local tokens = painter:tokens { "a red apple", "a dog" }
  local all, none = painters.told(painter, tokens, 0).text.embeddings, painters.told(painter, tokens, 1).text.embeddings
  check.close(all:tolist(), painter:condition({ "a red apple", "a dog" }).text.embeddings:tolist(), 1e-5)
  local null = painter:null().text.embeddings
  for i = 0, 1 do check.close(none[i]:tolist(), null[0]:tolist(), 1e-5) end
  local half = painters.told(painter, tokens:index_select(0, ty.zeros(400, { dtype = "i64" })), 0.25).text.embeddings
  local dropped = (half - null):abs():amax { 1, 2 }:lt(1e-4):to("f32"):mean():item()
  check.ok(dropped > 0.15 and dropped < 0.35, tostring(dropped))
end)

-- A recipe as far as painters ask it.
local function recipe(folder, args)
  local r = { name = "zoo/scene-unet", device = "cpu", args = args, seeds = { 0 }, entries = {} }
  function r.path(_, name) return folder .. "/" .. name end
  function r.say() end
  function r.place(_, fn) return fn() end
  return r
end

local function trained(training, steps, more)
  local painter, folder = small(), os.tmpname()
  os.remove(folder)
  ty.io.mkdir(folder)
  ty.manual_seed(5)
  local n = 8
  local set = { latents = ty.randn(n, 4, 16, 16):to "f16", tokens = painter:tokens { "a dog", "a cat", "a fish",
    "a pig", "a red dog", "two cats", "a blue fish", "a frog" }, shares = ty.full({ n, 64, 3 }, 85, { dtype = "u8" }),
    numbers = ty.full({ n, 3 }, 7, { dtype = "u8" }), colours = ty.full({ n, 3 }, 2, { dtype = "u8" }),
    phrases = ty.full({ n, 2, 12 }, 9, { dtype = "i64" }) }
  set.tokens = training.tokens or set.tokens
  local args = { steps = steps, lr = 0.02, every = 0, batch = 4 }
  for key, value in pairs(more or {}) do args[key] = value end
  local before = painter.text_encoder:state_dict()["text_model.final_layer_norm.weight"]:clone()
  local function words() return painter.text_encoder:state_dict()["text_model.final_layer_norm.weight"] end
  painters.fit(recipe(folder, args), painter, ty.data.TensorDataset(set), 0, function() return {} end, training)
  local lines = {}
  for _, name in ipairs { "crops/", "layout/", "", "alone/" } do
    local file = ("%s/seed0/%smetrics.jsonl"):format(folder, name)
    for line in (ty.io.exists(file) and io.lines(file) or function() end) do
      lines[#lines + 1] = ty.io.json_decode(line)
    end
  end
  os.execute(("rm -r '%s'"):format(folder))
  return lines, (words() - before):abs():max():item(), painter
end

check.test("cells are learnt beside pictures, and words stay as they are unless they learn", function()
  local cells = { weight = 1, width = 16, side = 8, module = function(network) return network.mid_block end }
  local lines, moved, painter = trained({ cells = cells }, 25)
  check.equal({ #lines, moved }, { 25, 0 })
  check.ok(lines[25].cells < lines[1].cells / 2, ("%g, %g"):format(lines[1].cells, lines[25].cells))
  check.close(lines[3].loss, lines[3].pictures + lines[3].cells, 1e-4)
  check.equal(painter.pipeline.components.unet, painter.network)
  check.equal(rawget(painter.network.mid_block, "_hooks"), false) -- the painter keeps nothing of how it was trained
  check.equal(painter:paint({ "a dog" }, { steps = 1 }).shape, { 1, 3, 64, 64 })
end)

check.test("windows around objects: the one that the phrase names is in the middle of what is cut out", function()
  local painter = small()
  local batch = zoo.scenes.set("training", { "image", "owner", "boxes", "scene" }, { objects = { 1, 2 } })
    :batch(ty.arange(40))
  local shares, numbers, colours = judge.tops(batch, 8)
  local n = 40
  -- Latents that say where they are.
  local places = (ty.arange(16):reshape(16, 1) * 16 + ty.arange(16)):to("f32"):reshape(1, 1, 16, 16)
  local whole = { latents = places:expand(n, 4, 16, 16):contiguous(), shares = (shares * 255):round():to "u8",
    numbers = numbers:to "u8", colours = colours:to "u8", phrases = zoo.crops.phrases(painter, batch.scene, 2) }
  ty.manual_seed(6)
  local cut = zoo.crops.draw(whole)
  check.equal({ cut.latents.shape, cut.shares.shape, cut.tokens.shape }, { { n, 4, 8, 8 }, { n, 16, 3 }, { n, 12 } })
  local seen, second = 0, 0
  for i = 0, n - 1 do
    local corner = cut.latents[i][0][0][0]:item()
    local y, x = corner // 16, corner % 16
    check.ok(y % 2 == 0 and x % 2 == 0 and y <= 8 and x <= 8)
    y, x = math.tointeger(y), math.tointeger(x)
    check.equal(cut.latents[i][3]:tolist(), places[0][0]:narrow(0, y, 8):narrow(1, x, 8):tolist())
    local cells = whole.shares[i]:reshape(8, 8, 3):narrow(0, y // 2, 4):narrow(1, x // 2, 4):reshape(16, 3)
    check.equal(cut.shares[i]:tolist(), cells:tolist())
    local row, phrases = cut.tokens[i]:tolist(), whole.phrases[i]:tolist()
    local objects = batch.scene[i + 1].objects
    for j = 1, #objects do
      if table.concat(row, " ") == table.concat(phrases[j], " ") then
        check.ok(cells:select(1, j - 1):max():item() > 0)
        seen, second = seen + 1, second + (j == 2 and 1 or 0)
        break
      end
    end
  end
  check.equal(seen, n)
  check.ok(second > 3, "the second object is looked at as well")
  check.equal(painter.tokenizer:decode(whole.phrases[0][0]:tolist()):match "^%W*(an? [%w ]+)" ~= nil, true)
end)

check.test("windows come first, and scenes go on from what was learnt of them", function()
  local cells = { weight = 1, width = 16, side = 8, module = function(network) return network.mid_block end }
  local lines = trained({ cells = cells, crops = { steps = 20, batch = 4 } }, 3)
  check.equal(#lines, 23)
  check.ok(lines[21].cells < lines[1].cells / 2, ("%g, %g"):format(lines[1].cells, lines[21].cells))
end)

check.test("scenes alone come last: they go on from what was learnt, and words stay as they were", function()
  local cells = { weight = 1, width = 16, side = 8, module = function(network) return network.mid_block end }
  local words = {}
  for i, steps in ipairs { 0, 20 } do
    local lines, moved, painter = trained({ text = "tuned", cells = cells, crops = { steps = 2, batch = 4, beside = 8 },
      alone = steps > 0 and { steps = steps, batch = 4 } or nil }, 3)
    check.equal(#lines, 5 + steps)
    check.ok(lines[4].pictures2 and not lines[1].pictures2 and moved > 0)
    if steps > 0 then check.ok(not lines[6].pictures2 and lines[25].cells < lines[6].cells) end
    words[i] = painter.text_encoder:state_dict()["text_model.final_layer_norm.weight"]:tolist()
    check.equal(painter.pipeline.components.text_encoder, painter.text_encoder)
  end
  check.equal(words[1], words[2])
end)

check.test("where captions put things is learnt from noise alone, with the words, before scenes are", function()
  local cells = { weight = 0.1, width = 16, side = 8, module = function(network) return network.mid_block end }
  local lines, moved = trained({ text = "tuned", cells = cells, layout = { steps = 40, batch = 4 } }, 3)
  local _, tuned = trained({ text = "tuned", cells = cells }, 3)
  check.equal(#lines, 43)
  -- Cells count in full there, and next to nothing of a picture can be said.
  check.close(lines[5].loss, lines[5].pictures + lines[5].cells, 1e-4)
  check.close(lines[43].loss, lines[43].pictures + 0.1 * lines[43].cells, 1e-4)
  check.ok(lines[40].cells < lines[1].cells / 2, ("%g, %g"):format(lines[1].cells, lines[40].cells))
  check.ok(moved > 3 * tuned, ("%g, %g"):format(moved, tuned))
  check.fails(function() trained({ layout = { steps = 1, batch = 4 } }, 1) end,
    "painter.fit: training: expected cells with crops or layout, got none")
end)

check.test("errors count as the weighting says, but not from noise alone, where all are alike", function()
  local cells = { weight = 1, width = 16, side = 8, module = function(network) return network.mid_block end }
  local function four(alpha) return alpha * 0 + 4 end
  local function first(weighting, more, steps)
    local training = { weighting = weighting, cells = cells }
    for name, phase in pairs(more) do training[name] = phase end
    return trained(training, steps)[1].pictures
  end
  for name, case in pairs { scenes = { {}, 1, 4 }, alone = { { alone = { steps = 1, batch = 4 } }, 0, 4 },
    crops = { { crops = { steps = 1, batch = 4, beside = 0 } }, 0, 4 },
    layout = { { layout = { steps = 1, batch = 4 } }, 0, 1 } } do
    local more, steps, times = table.unpack(case)
    check.close(first(four, more, steps) / first(nil, more, steps), times, 1e-4, name)
  end
end)

check.test("of two captions of a scene the one that names a place is drawn as often as asked for", function()
  local painter, loss = small(), {}
  local function lesson(second, placed) -- the loss of the fourth step with tokens of a dog, and of `second`
    local list = { painter:tokens { "a dog" }, painter:tokens { second } }
    local tokens = ty.stack(list, 1):expand(8, 2, list[1].shape[2]):contiguous()
    return trained({ placed = placed, tokens = tokens }, 4)[4].loss
  end
  for i, placed in ipairs { 0, 1 } do loss[i] = lesson("a cat at the top", placed) end
  check.equal(loss[1], lesson("a dog", 0))
  check.equal(loss[1], lesson("a dog", 1))
  check.ok(loss[1] ~= loss[2])
end)

check.test("words that are tuned move a little, those that are learnt much more", function()
  local _, tuned = trained({ text = "tuned" }, 4)
  local _, new = trained({ text = "new" }, 4)
  check.ok(tuned > 0 and new > 3 * tuned, ("%g, %g"):format(tuned, new))
end)

check.test("--base: the model that ships is measured, and what is not there is one clear error", function()
  local r = recipe("/tmp", { base = "" })
  check.equal(zoo.scenes.shipped(r, 0), nil)
  r.args.base, r.base = "/nowhere", function(_, name) return "/nowhere/" .. name end
  check.fails(function() zoo.scenes.shipped(r, 0) end, "zoo/scene%-unet: %-%-base: expected a folder zoo/")
  r.name, r.base = "zoo/scene-resnet", function() return zoo.path "scene-resnet" end
  r.seeds = { 0, 1 }
  check.equal(zoo.scenes.shipped(r, 0).training, false)
  check.equal(zoo.scenes.shipped(r, 1), nil, "another seed is trained")
  r.entries = { { "widths", { 48, 96 }, "" }, { "guidance", 5.0, "" }, { "seed", 0, "" } }
  r.args.widths, r.args.guidance, r.args.seed = { 48, 96 }, 3.0, 0
  check.ok(zoo.scenes.shipped(r, 0), "how it draws may be told")
  r.args.widths = { 64, 128 }
  check.fails(function() zoo.scenes.shipped(r, 0) end, "%-%-base: expected the arguments that the model in .* was made "
    .. "with, got %-%-widths 64,128; without %-%-base another is made")
  r.args.widths, r.args.seed = { 48, 96 }, 3
  check.fails(function() zoo.scenes.shipped(r, 0) end, "got %-%-seed 3")
  r.quick = true
  check.ok(zoo.scenes.shipped(r, 0), "a quick run judges nothing")
end)

check.finish()
