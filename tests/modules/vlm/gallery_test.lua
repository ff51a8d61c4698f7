-- Pictures of a folder found by words: the index beside them, what is encoded again and what is not, pictures that
-- cannot be read, and what is found.
local here = arg and arg[0]:match ".*/" or "tests/modules/vlm/"
local check = dofile(here .. "../../lua/check.lua")
local ty = require "tycho"
local models, vlm = require "tycho.models", require "tycho.vlm"

local root = os.tmpname()
os.remove(root)
ty.io.mkdir(root)
local folder, encoder_path = root .. "/pictures", root .. "/clip"
ty.io.mkdir(folder)
ty.io.mkdir(folder .. "/deeper")

ty.manual_seed(4)
local tokenizer = ty.tokenizer.train({ "a red car a green tree" }, { vocabulary = 270, special = { "<end>" } })
ty.tokenizer.fields(tokenizer).eos = 0
local function write_encoder(path, seed)
  ty.manual_seed(seed)
  ty.io.mkdir(path)
  tokenizer:save(path)
  models.CLIPModel({ model_type = "clip", projection_dim = 12,
    text_config = { vocab_size = tokenizer.size, hidden_size = 16, intermediate_size = 16, num_hidden_layers = 1,
      num_attention_heads = 2, max_position_embeddings = 8, eos_token_id = 0 },
    vision_config = { image_size = 8, patch_size = 4, hidden_size = 16, intermediate_size = 16, num_hidden_layers = 1,
      num_attention_heads = 2 } }):save(path)
  ty.io.save_json(path .. "/preprocessor_config.json", { image_processor_type = "CLIPImageProcessor",
    do_resize = true, size = { height = 8, width = 8 }, resample = 3, do_rescale = true, do_normalize = true,
    image_mean = ty.io.array { 0.5, 0.5, 0.5 }, image_std = ty.io.array { 0.5, 0.5, 0.5 } })
end
write_encoder(encoder_path, 1)
local encoder = vlm.gallery_encoder(encoder_path)

local function picture(name, seed, channels)
  ty.manual_seed(seed)
  ty.io.save_image(folder .. "/" .. name, ty.randint(0, 256, { channels or 3, 9, 13 }):to "u8")
end
for i = 1, 5 do picture(("%d.png"):format(i), i) end
picture("deeper/6.webp", 6)
picture("gray.png", 7, 1)
picture("alpha.png", 8, 4)
ty.io.write_atomic(folder .. "/broken.jpg", "\xff\xd8\xff that is all")
ty.io.write_atomic(folder .. "/notes.txt", "no picture")
local index = folder .. "/.tycho-gallery.safetensors"

check.test("all pictures that can be read are encoded, once", function()
  local progress = {}
  local gallery = vlm.gallery(folder, encoder, { batch = 3, on_progress = function(done, all)
    progress[#progress + 1] = { done, all }
  end })
  check.equal(gallery.paths, { "1.png", "2.png", "3.png", "4.png", "5.png", "alpha.png", "deeper/6.webp", "gray.png" })
  check.equal(progress, { { 3, 9 }, { 6, 9 }, { 9, 9 } })
  local broken = gallery.problems["broken.jpg"] or ""
  check.ok(broken:find("broken.jpg", 1, true), broken)
  check.equal(gallery.encoded, 9)
  -- Each row is what the encoder gives for the picture alone.
  for i, path in ipairs(gallery.paths) do
    local alone = encoder:pictures(encoder.process { folder .. "/" .. path }):select(0, 0)
    check.ok((gallery.features[i - 1] - alone):abs():max():item() < 1e-5, path)
  end
  check.close(gallery.features:square():sum(1):tolist(), { 1, 1, 1, 1, 1, 1, 1, 1 }, 1e-5)
  local again = vlm.gallery(folder, encoder)
  check.equal({ again.encoded, again.paths }, { 1, gallery.paths }) -- what could not be read is tried again
  check.equal(again.features:tolist(), gallery.features:tolist())
end)

check.test("what is new or has changed is encoded, what is gone is forgotten", function()
  local before = vlm.gallery(folder, encoder)
  os.remove(folder .. "/broken.jpg")
  os.remove(folder .. "/2.png")
  picture("9.png", 9)
  ty.io.write_atomic(folder .. "/3.png", ty.io.read(folder .. "/1.png"))
  local after = vlm.gallery(folder, encoder)
  check.equal(after.paths, { "1.png", "3.png", "4.png", "5.png", "9.png", "alpha.png", "deeper/6.webp", "gray.png" })
  check.equal(after.encoded, 2)
  check.equal(after.features[1]:tolist(), after.features[0]:tolist())
  check.equal(after.features[3]:tolist(), before.features[4]:tolist())
  check.equal(vlm.gallery(folder, encoder).encoded, 0)
end)

check.test("an index of another model, or one that is broken, is made anew", function()
  write_encoder(root .. "/other", 2)
  local other = vlm.gallery_encoder(root .. "/other")
  check.equal(vlm.gallery(folder, other).encoded, 8)
  check.equal(vlm.gallery(folder, encoder).encoded, 8)
  local bytes = ty.io.read(index)
  for _, broken in ipairs { "", "nonsense", bytes:sub(1, #bytes - 7), bytes:sub(1, 40) } do
    ty.io.write_atomic(index, broken)
    check.equal(vlm.gallery(folder, encoder).encoded, 8)
  end
  os.remove(index)
  check.equal(vlm.gallery(folder, encoder, { keep = false }).encoded, 8)
  check.equal(ty.io.exists(index), false)
end)

check.test("what is found, by words and by a picture", function()
  local gallery = vlm.gallery(folder, encoder)
  local vector = encoder:texts({ "a red car" }):select(0, 0)
  local scores = gallery.features:matmul(vector):tolist()
  local found = gallery:search("a red car", 20)
  check.equal(#found, 8)
  for i, one in ipairs(found) do
    local row
    for k, path in ipairs(gallery.paths) do
      if folder .. "/" .. path == one.path then row = k end
    end
    check.close(one.score, scores[row], 1e-6)
    check.ok(i == 1 or one.score <= found[i - 1].score)
  end
  local mean = ty.nn.normalize(encoder:texts({ "a red car", "a green tree" }):mean({ 0 }, true)):select(0, 0)
  local best = gallery:search({ "a red car", "a green tree" }, 1)[1]
  check.close(best.score, gallery.features:matmul(mean):max():item(), 1e-6)
  local like = gallery:like(folder .. "/5.png", 1)[1]
  check.equal(like.path, folder .. "/5.png")
  check.close(like.score, 1, 1e-5)
end)

check.test("pictures keep their shape where the encoder is a SigLIP 2 (NaFlex)", function()
  local path = root .. "/naflex"
  ty.manual_seed(3)
  ty.io.mkdir(path)
  tokenizer:save(path)
  models.Siglip2Model({ model_type = "siglip2",
    text_config = { vocab_size = tokenizer.size, hidden_size = 16, intermediate_size = 16, num_hidden_layers = 1,
      num_attention_heads = 2, max_position_embeddings = 8 },
    vision_config = { patch_size = 4, num_patches = 9, hidden_size = 16, intermediate_size = 16, num_hidden_layers = 1,
      num_attention_heads = 2 } }):save(path)
  local function write_processor(changes)
    local config = { image_processor_type = "Siglip2ImageProcessor", patch_size = 4, max_num_patches = 12,
      image_mean = ty.io.array { 0.5, 0.5, 0.5 }, image_std = ty.io.array { 0.5, 0.5, 0.5 } }
    for key, value in pairs(changes) do config[key] = value end
    ty.io.save_json(path .. "/preprocessor_config.json", config)
  end
  write_processor {}
  local naflex = vlm.gallery_encoder(path)
  local gallery = vlm.gallery(folder, naflex, { batch = 3 })
  check.equal(#gallery.paths, 8)
  for i, name in ipairs(gallery.paths) do
    local patches, sizes = naflex.process { folder .. "/" .. name }
    check.equal(sizes:tolist(), { { 3, 4 } }) -- 9 x 13 pixels
    local alone = naflex:pictures(patches, sizes):select(0, 0)
    check.ok((gallery.features[i - 1] - alone):abs():max():item() < 1e-5, name)
  end
  local found = gallery:like(folder .. "/5.png", 1)[1]
  check.equal({ found.path, #gallery:search("a red car", 3) }, { folder .. "/5.png", 3 })
  write_processor { patch_size = 8 }
  check.fails(function() vlm.gallery_encoder(path) end, "makes patches of 192 values, the model takes patches of 48")
  write_processor { image_processor_type = "SiglipImageProcessor", size = { height = 8, width = 8 } }
  check.fails(function() vlm.gallery_encoder(path) end, "makes no patches, the model takes patches of 48 values")
  os.remove(index)
end)

check.test("an empty folder finds nothing; wrong arguments", function()
  ty.io.mkdir(root .. "/empty")
  local gallery = vlm.gallery(root .. "/empty", encoder)
  check.equal({ gallery.paths, gallery:search "anything", ty.io.exists(root .. "/empty/.tycho-gallery.safetensors") },
    { {}, {}, false })
  check.fails(function() vlm.gallery(root .. "/nowhere", encoder) end, "is no folder")
  check.fails(function() vlm.gallery(folder, {}) end, "encoder: expected one of vlm.gallery_encoder, got an empty")
  check.fails(function() gallery:search(3) end, "Gallery:search: text: expected a string or a list of strings, got 3")
  check.fails(function() gallery:search("a", 0) end, "Gallery:search: count: expected an integer >= 1, got 0")
  check.fails(function() vlm.gallery_encoder(root .. "/nowhere") end, "nowhere")
  local config = ty.io.load_json(encoder_path .. "/preprocessor_config.json")
  config.size.height = 16
  ty.io.save_json(encoder_path .. "/preprocessor_config.json", config)
  check.fails(function() vlm.gallery_encoder(encoder_path) end,
    "preprocessor_config.json makes pictures of 16 x 8, the model takes 8 x 8")
  config.image_processor_type, config.patch_size, config.max_num_patches = "Siglip2ImageProcessor", 4, 16
  ty.io.save_json(encoder_path .. "/preprocessor_config.json", config)
  check.fails(function() vlm.gallery_encoder(encoder_path) end, "makes patches, the model takes pictures of 8 x 8")
end)

os.execute(("rm -rf '%s'"):format(root))
check.finish()
