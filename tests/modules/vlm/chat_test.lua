-- A folder with a model that sees, read and talked to as published ones are.
local here = arg and arg[0]:match ".*/" or "tests/modules/vlm/"
local check = dofile(here .. "../../lua/check.lua")
local ty = require "tycho"
local hub, models, vlm = require "tycho.hub", require "tycho.models", require "tycho.vlm"

local folder = os.tmpname()
os.remove(folder)
ty.io.mkdir(folder)

local template = "{% for message in messages %}{% if message.content is string %}{{ ' ' + message.content + '\n' }}"
  .. "{% else %}{% for part in message.content %}{% if part.type == 'image' %}<image>{% endif %}"
  .. "{% if part.type == 'text' %}{{ ' ' + part.text + '\n' }}{% endif %}{% endfor %}{% endif %}{% endfor %}"

local processor = { image_processor_type = "CLIPImageProcessor", do_resize = true, size = { height = 8, width = 8 },
  resample = 3, do_rescale = true, rescale_factor = 1 / 255, do_normalize = true,
  image_mean = ty.io.array { 0.5, 0.5, 0.5 }, image_std = ty.io.array { 0.5, 0.5, 0.5 } }
local function write_processor(changes)
  local config = {}
  for key, value in pairs(processor) do config[key] = value end
  for key, value in pairs(changes or {}) do config[key] = value end
  ty.io.save_json(folder .. "/preprocessor_config.json", config)
end

ty.manual_seed(11)
local tokenizer = ty.tokenizer.train({ " what is this?\n a red apple" }, { vocabulary = 280,
  special = { "<|endoftext|>", "<image>" } })
local fields = ty.tokenizer.fields(tokenizer)
fields.eos, fields.chat_template = 0, template
tokenizer:save(folder)
models.Llava({ model_type = "llava", image_token_index = 1, tie_word_embeddings = true, vision_feature_layer = -1,
  eos_token_id = 0,
  text_config = { model_type = "llama", vocab_size = tokenizer.size, hidden_size = 16, intermediate_size = 32,
    num_hidden_layers = 1, num_attention_heads = 2, max_position_embeddings = 64, tie_word_embeddings = true },
  vision_config = { model_type = "clip_vision_model", image_size = 8, patch_size = 4, hidden_size = 8,
    intermediate_size = 16, num_hidden_layers = 1, num_attention_heads = 2 } }):save(folder)
write_processor()

local picture = ty.randint(0, 256, { 3, 8, 8 }):to "u8"
local function asked(image)
  return { { role = "user", content = { { type = "image", image = image },
    { type = "text", text = "what is this?" } } } }
end

check.test("messages become tokens, one for each feature of a picture, and pictures", function()
  local chat = vlm.load(folder)
  local tokens, pictures = chat:inputs(asked(picture))
  local words = tokenizer:encode(" what is this?\n"):tolist()
  check.equal(tokens:select(0, 0):tolist(), table.move(words, 1, #words, 5, { 1, 1, 1, 1 }))
  check.ok((pictures - (picture:to("f32"):unsqueeze(0) / 127.5 - 1)):abs():max():item() < 1e-6)
  local without, none = chat:inputs { { role = "user", content = "what?" } }
  check.equal({ without:select(0, 0):tolist(), none == nil }, { tokenizer:encode(" what?\n"):tolist(), true })
end)

check.test("the answer is what the model generates, as it comes and whole", function()
  local chat = vlm.load(folder)
  local tokens, pictures = chat:inputs(asked(picture))
  local made = chat.model:generate(tokens, 6, { temperature = 0, pictures = pictures }):select(0, 0):tolist()
  local ids = {}
  for i = tokens.shape[2] + 1, #made do
    if made[i] == 0 then break end
    ids[#ids + 1] = made[i]
  end
  local said = ""
  local answer = chat:generate(asked(picture), { max_tokens = 6, on_text = function(text) said = said .. text end })
  check.equal({ answer, said }, { tokenizer:decode(ids):gsub("^%s+", ""), answer })
  local path = folder .. "/picture.png"
  ty.io.save_image(path, picture)
  check.equal(chat:generate(asked(path), { max_tokens = 6 }), answer)
end)

check.test("pictures are resized, cropped and normalised as the file says", function()
  local wide = ty.randint(0, 256, { 3, 12, 20 }):to "u8"
  write_processor { size = { shortest_edge = 6 }, do_center_crop = true, crop_size = { height = 4, width = 4 } }
  local x = hub.processor(folder) { wide }
  local want = wide:to("f32"):unsqueeze(0)
  want = ty.resample(want, 3, 10, "cubic", false, 0, true):round():clamp(0, 255) -- rows first, as PIL
  want = ty.resample(want, 2, 6, "cubic", false, 0, true):round():clamp(0, 255)
  want = want:narrow(2, 1, 4):narrow(3, 3, 4) / 127.5 - 1
  check.ok((x - want):abs():max():item() < 1e-6)
  write_processor { do_resize = false, do_normalize = false, do_rescale = false, do_center_crop = true,
    crop_size = 16, image_processor_type = "ViTImageProcessor" }
  local grey = ty.full({ 1, 10, 16 }, 7, { dtype = "u8" })
  local y = hub.processor(folder) { grey }
  check.equal(y.shape, { 1, 3, 16, 16 })
  check.equal({ y:sum():item(), y:select(2, 2):sum():item(), y:select(2, 3):sum():item() },
    { 7.0 * 3 * 160, 0.0, 7.0 * 3 * 16 })
end)

check.test("what does not fit together is one clear error", function()
  write_processor { size = { height = 16, width = 8 } }
  check.fails(function() vlm.load(folder) end, "makes pictures of 16 x 8, the model takes 8 x 8")
  write_processor { image_processor_type = "DonutImageProcessor" }
  check.fails(function() vlm.load(folder) end, "image_processor_type: expected that of CLIP")
  write_processor { image_processor_type = "Qwen2VLImageProcessor", size = ty.io.null }
  check.fails(function() vlm.load(folder) end, "makes patches, the model takes pictures of 8 x 8")
  write_processor { image_processor_type = "LlavaNextImageProcessor", size = { shortest_edge = 8 },
    crop_size = { height = 8, width = 8 }, image_grid_pinpoints = { { 8, 16 } } }
  check.fails(function() vlm.load(folder) end, "preprocessor_config.json makes what the model does not take: ")
  write_processor { size = { height = 1 << 40, width = 8 } }
  check.fails(function() vlm.load(folder) end, "size: expected { height, width }")
  write_processor { image_std = ty.io.array { 0.5 } }
  check.fails(function() vlm.load(folder) end, "image_std: expected a list of three numbers")
  write_processor()
  local chat = vlm.load(folder)
  check.fails(function() chat:inputs { { role = "user", content = "an <image>?" } } end,
    "expected as many pictures as image tokens in the text, got 0 and 1")
  check.fails(function() chat:generate(asked(ty.zeros(3, 8, 8))) end, "picture 1: expected a path or u8")
  check.fails(function() vlm.load(folder .. "/none") end, "none")
end)

check.test("a GGUF file and the mmproj file that belongs to it", function()
  write_processor()
  local chat = vlm.load(folder)
  local language, mmproj = folder .. "/language.gguf", folder .. "/mmproj.gguf"
  hub.save_gguf(chat.model.language_model, language, { tokenizer = folder })
  hub.mmproj.save(chat.model, mmproj, { dtype = "f32", image_mean = { 0.5, 0.5, 0.5 }, image_std = { 0.5, 0.5, 0.5 } })
  local plain = "{% for message in messages %}{{ ' ' + message.content + '\\n' }}{% endfor %}"
  local other = vlm.load(language, { mmproj = mmproj, template = plain })
  local tokens, pictures = other:inputs(asked(picture))
  local image = other.model:image_token()
  check.equal(image, tokenizer.size)
  local before, behind = tokenizer:encode(" "):tolist(), tokenizer:encode("\nwhat is this?\n"):tolist()
  local want = table.move({ image, image, image, image }, 1, 4, #before + 1, before)
  check.equal(tokens:select(0, 0):tolist(), table.move(behind, 1, #behind, #want + 1, want))
  check.ok((pictures - (picture:to("f32"):unsqueeze(0) / 127.5 - 1)):abs():max():item() < 1e-6)
  -- The same tokens give the same logits as those of the folder.
  local own = ty.where(tokens:eq(image), 1, tokens)
  local difference = other.model(tokens, { pictures = pictures }) - chat.model(own, { pictures = pictures })
  check.ok(difference:abs():max():item() < 1e-4)
  check.equal(type(other:generate(asked(picture), { max_tokens = 3 })), "string")
  check.fails(function() vlm.load(language) end, "expected the option mmproj")
  check.fails(function() vlm.load(language, { mmproj = mmproj }) end, "has no template of chats")
  check.fails(function() vlm.load(language, { mmproj = language, template = plain }) end, "expected an mmproj file")
  check.fails(function() vlm.load(folder, { mmproj = mmproj }) end, "mmproj: goes with a GGUF file")
  check.fails(function() other:inputs { { role = "user", content = "a <__media__>?" } } end,
    "expected as many pictures as image tokens in the text, got 0 and 1")
end)

check.test("models of patches and of tiles are talked to in the same way", function()
  local path = folder .. "/other"
  local marks = ty.tokenizer.train({ " what is this?\n a red apple" }, { vocabulary = 280,
    special = { "<|endoftext|>", "<image>" } })
  local own = ty.tokenizer.fields(marks)
  own.eos, own.chat_template = 0, template
  local text = { vocab_size = marks.size, hidden_size = 16, intermediate_size = 32, num_hidden_layers = 1,
    num_attention_heads = 2, max_position_embeddings = 256 }
  local function with(more)
    local result = { model_type = "llama" }
    for key, value in pairs(text) do result[key] = value end
    for key, value in pairs(more or {}) do result[key] = value end
    return result
  end
  local made = {
    { models.Qwen2VL { model_type = "qwen2_vl", image_token_id = 1, eos_token_id = 0, text_config = with {
      model_type = "qwen2_vl_text", rope_parameters = { rope_theta = 1e4, mrope_section = { 1, 1, 2 } } },
      vision_config = { depth = 1, embed_dim = 16, hidden_size = 16, num_heads = 2, mlp_ratio = 2, patch_size = 4 } },
      { image_processor_type = "Qwen2VLImageProcessor", patch_size = 4, min_pixels = 64, max_pixels = 1024 } },
    { models.LlavaNext { model_type = "llava_next", image_token_index = 1, eos_token_id = 0, text_config = with(),
      image_grid_pinpoints = { { 8, 16 }, { 16, 8 } }, vision_config = { model_type = "clip_vision_model",
        image_size = 8, patch_size = 4, hidden_size = 8, intermediate_size = 16, num_hidden_layers = 1,
        num_attention_heads = 2 } }, { image_processor_type = "LlavaNextImageProcessor", size = { shortest_edge = 8 },
      crop_size = { height = 8, width = 8 }, image_grid_pinpoints = { { 8, 16 }, { 16, 8 } } } },
  }
  for _, pair in ipairs(made) do
    pair[1]:save(path)
    marks:save(path)
    local config = pair[2]
    config.image_mean, config.image_std = ty.io.array { 0.5, 0.5, 0.5 }, ty.io.array { 0.5, 0.5, 0.5 }
    ty.io.save_json(path .. "/preprocessor_config.json", config)
    local chat = vlm.load(path)
    -- Two pictures of different sizes, each with a token for each of its features.
    local wide = ty.randint(0, 256, { 3, 9, 30 }):to "u8"
    local messages = { { role = "user", content = { { type = "image", image = wide },
      { type = "image", image = ty.randint(0, 256, { 3, 21, 16 }):to "u8" }, { type = "text", text = "what?" } } } }
    local tokens, pictures, sizes = chat:inputs(messages)
    local counts = chat.model:feature_counts(pictures, sizes)
    check.equal(tokens:eq(1):to("i64"):sum():item(), counts[1] + counts[2])
    check.ok(counts[1] ~= counts[2], "counts")
    local answer = chat:generate(messages, { max_tokens = 5 })
    local ids = chat.model:generate(tokens, 5, { temperature = 0, pictures = pictures, sizes = sizes })
      :select(0, 0):tolist()
    local said = {}
    for i = tokens.shape[2] + 1, #ids do
      if ids[i] == 0 then break end
      said[#said + 1] = ids[i]
    end
    check.equal(answer, (marks:decode(said):gsub("^%s+", "")))
    os.execute(("rm -rf '%s'"):format(path))
  end
end)

os.execute(("rm -rf '%s'"):format(folder))
check.finish()
