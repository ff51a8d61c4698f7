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

check.test("an answer ends where generation_config.json says, and does not say so", function()
  local chat = vlm.load(folder)
  check.equal(chat:ends(), { [0] = true })
  local tokens, pictures = chat:inputs(asked(picture))
  local made = chat.model:generate(tokens, 3, { temperature = 0, pictures = pictures, stop_tokens = false })
  made = made:select(0, 0):narrow(0, tokens.shape[2], 3):tolist()
  chat.model.generation_config = { eos_token_id = { 0, made[2] } }
  local said = made[1] == made[2] and {} or { made[1] }
  check.equal(chat:generate(asked(picture), { max_tokens = 3 }), (tokenizer:decode(said):gsub("^%s+", "")))
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

check.test("pictures of every kind, and those that cannot be: one error with the file's name, all goes on", function()
  write_processor()
  local chat, io = vlm.load(folder), check.root .. "tests/fixtures/io/"
  local before = chat:generate(asked(picture), { max_tokens = 4 })
  for _, name in ipairs { "gray.png", "gray_alpha.png", "rgba.png", "gray16.png", "one_bit.png", "palette_alpha.png",
    "cmyk.jpg", "progressive.jpg", "turned.jpg" } do
    local _, pictures = chat:inputs(asked(io .. name))
    check.equal({ pictures.shape, pictures:isfinite():all():item() }, { { 1, 3, 8, 8 }, true }, name)
  end
  -- A photograph that was held upright comes so.
  local _, turned = chat:inputs(asked(io .. "turned.jpg"))
  local _, same = chat:inputs(asked(ty.io.load_image(io .. "turned.jpg", { exif = false }):transpose(1, 2):flip { 2 }
    :contiguous()))
  check.equal(turned:tolist(), same:tolist())
  local bytes = ty.io.read(io .. "rgb.png")
  local function crc(text)
    local sum = 0xffffffff
    for i = 1, #text do
      sum = sum ~ text:byte(i)
      for _ = 1, 8 do sum = sum >> 1 ~ (sum & 1 == 1 and 0xedb88320 or 0) end
    end
    return ~sum & 0xffffffff
  end
  local header = "IHDR" .. string.pack(">I4I4", 65535, 65535) .. bytes:sub(25, 29)
  local bad = { ["cut.jpg"] = ty.io.read(io .. "baseline.jpg"):sub(1, 300), ["cut.png"] = bytes:sub(1, -30),
    ["huge.png"] = bytes:sub(1, 12) .. header .. string.pack(">I4", crc(header)) .. bytes:sub(34),
    ["empty.png"] = "", ["text.jpg"] = "no picture", ["missing.png"] = false }
  for name, content in pairs(bad) do
    local path = folder .. "/" .. name
    if content then ty.io.write_atomic(path, content) end
    local ok, problem = pcall(chat.generate, chat, asked(path), { max_tokens = 4 })
    check.ok(not ok and tostring(problem):find(name, 1, true), name .. ": " .. tostring(problem))
    check.ok(tostring(problem):find "chat_test%.lua:%d+: processor: picture 1: ", tostring(problem))
    if name == "huge.png" then check.ok(problem:find("claims 65535 x 65535 pixels", 1, true), problem) end
    os.remove(path)
  end
  check.equal(chat:generate(asked(picture), { max_tokens = 4 }), before)
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
    -- What would go through, and be read wrongly.
    if config.merge_size == nil and pair[1].visual then
      config.merge_size, config.patch_size, config.min_pixels = 4, 4, 256
      ty.io.save_json(path .. "/preprocessor_config.json", config)
      check.fails(function() vlm.load(path) end, "preprocessor_config.json says merge_size 4, the model's config 2")
    else
      config.image_grid_pinpoints = { { 16, 8 }, { 8, 16 } }
      ty.io.save_json(path .. "/preprocessor_config.json", config)
      check.fails(function() vlm.load(path) end, "preprocessor_config.json says image_grid_pinpoints [[16,8],[8,16]], "
        .. "the model's config [[8,16],[16,8]]")
    end
    os.execute(("rm -rf '%s'"):format(path))
  end
end)

-- Writes a tokenizer that begins every text with a token, as Llama's and Gemma's do.
local function save_beginning(marks, path, token, id)
  marks:save(path)
  local json = ty.io.load_json(path .. "/tokenizer.json")
  local begin, text = { SpecialToken = { id = token, type_id = 0 } }, { Sequence = { id = "A", type_id = 0 } }
  json.post_processor = { type = "TemplateProcessing", single = ty.io.array { begin, text },
    pair = ty.io.array { begin, text, { Sequence = { id = "B", type_id = 1 } } },
    special_tokens = { [token] = { id = token, ids = ty.io.array { id }, tokens = ty.io.array { token } } } }
  ty.io.save_json(path .. "/tokenizer.json", json)
  check.equal(ty.tokenizer.load(path):encode("a"):tolist()[1], id)
end

check.test("a template of its own file; a text is begun once", function()
  local path = folder .. "/begun"
  local marks = ty.tokenizer.train({ " what is this?\n a red apple" }, { vocabulary = 280,
    special = { "<|endoftext|>", "<image>", "<s>" } })
  local own = ty.tokenizer.fields(marks)
  own.eos, own.bos = 0, 2
  models.Llava({ model_type = "llava", image_token_index = 1, vision_feature_layer = -1, eos_token_id = 0,
    text_config = { model_type = "llama", vocab_size = marks.size, hidden_size = 16, intermediate_size = 32,
      num_hidden_layers = 1, num_attention_heads = 2, max_position_embeddings = 64 },
    vision_config = { model_type = "clip_vision_model", image_size = 8, patch_size = 4, hidden_size = 8,
      intermediate_size = 16, num_hidden_layers = 1, num_attention_heads = 2 } }):save(path)
  save_beginning(marks, path, "<s>", 2)
  ty.io.save_json(path .. "/preprocessor_config.json", processor)
  check.fails(function() vlm.load(path) end, "has no chat template")
  local words = marks:encode(" what is this?\n", { special = false }):tolist()
  local want = table.move(words, 1, #words, 6, { 2, 1, 1, 1, 1 })
  for _, begun in ipairs { "", "<s>" } do
    ty.io.save_json(path .. "/chat_template.json", { chat_template = begun .. template })
    local tokens = vlm.load(path):inputs(asked(picture))
    check.equal(tokens:select(0, 0):tolist(), want, "begun by " .. (begun == "" and "the tokenizer" or "the template"))
  end
  os.remove(path .. "/tokenizer.json")
  os.remove(path .. "/vocab.json")
  check.fails(function() vlm.load(path) end, "expected a folder with a tokenizer, got none")
  os.execute(("rm -rf '%s'"):format(path))
end)

check.test("PaliGemma, whose files have no template: pictures, the beginning, a text, the end of a line", function()
  local path = folder .. "/paligemma"
  local marks = ty.tokenizer.train({ " what is this?\n a red apple" }, { vocabulary = 280,
    special = { "<|endoftext|>", "<image>", "<bos>" } })
  local own = ty.tokenizer.fields(marks)
  own.eos, own.bos = 0, 2
  ty.manual_seed(5)
  models.PaliGemma({ model_type = "paligemma", image_token_index = 1, eos_token_id = 0,
    text_config = { model_type = "gemma", vocab_size = marks.size, hidden_size = 16, intermediate_size = 32,
      num_hidden_layers = 1, num_attention_heads = 2, num_key_value_heads = 1, head_dim = 8 },
    vision_config = { model_type = "siglip_vision_model", image_size = 8, patch_size = 4, hidden_size = 8,
      intermediate_size = 16, num_hidden_layers = 1, num_attention_heads = 2 } }):save(path)
  save_beginning(marks, path, "<bos>", 2)
  local config = { image_processor_type = "SiglipImageProcessor" }
  for key, value in pairs(processor) do config[key] = config[key] or value end
  ty.io.save_json(path .. "/preprocessor_config.json", config)
  local chat = vlm.load(path)
  local content = { { type = "text", text = " what is this?" }, { type = "image", image = picture },
    { type = "image", image = picture } }
  local tokens, pictures = chat:inputs { { role = "user", content = content } }
  local words = marks:encode(" what is this?\n", { special = false }):tolist()
  check.equal(tokens:select(0, 0):tolist(), table.move(words, 1, #words, 10, { 1, 1, 1, 1, 1, 1, 1, 1, 2 }))
  check.equal(pictures.shape, { 2, 3, 8, 8 })
  local text = chat:inputs { { role = "user", content = " what is this?" } }
  check.equal(text:select(0, 0):tolist(), table.move(words, 1, #words, 2, { 2 }))
  check.equal(type(chat:generate({ { role = "user", content = content } }, { max_tokens = 3 })), "string")
  check.fails(function() chat:inputs { { role = "user", content = "a" }, { role = "assistant", content = "b" } } end,
    "a PaliGemma takes one message")
  os.execute(("rm -rf '%s'"):format(path))
end)

-- As the files of Qwen2-VL and Qwen2.5-VL have it.
local qwen_template = "{% set image_count = namespace(value=0) %}{% set video_count = namespace(value=0) %}"
  .. "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}<|im_start|>system\nYou are a "
  .. "helpful assistant.<|im_end|>\n{% endif %}<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}"
  .. "{{ message['content'] }}<|im_end|>\n{% else %}{% for content in message['content'] %}{% if content['type'] == "
  .. "'image' or 'image' in content or 'image_url' in content %}{% set image_count.value = image_count.value + 1 %}"
  .. "{% if add_vision_id %}Picture {{ image_count.value }}: {% endif %}<|vision_start|><|image_pad|><|vision_end|>"
  .. "{% elif content['type'] == 'video' or 'video' in content %}{% set video_count.value = video_count.value + 1 %}"
  .. "{% if add_vision_id %}Video {{ video_count.value }}: {% endif %}<|vision_start|><|video_pad|><|vision_end|>"
  .. "{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
  .. "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"

check.test("clips are shown to models that see them, beside pictures", function()
  local path = folder .. "/clips"
  local marks = ty.tokenizer.train({ " what is this?\n a red apple" }, { vocabulary = 280,
    special = { "<|endoftext|>", "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>", "<|im_start|>",
      "<|im_end|>" } })
  local own = ty.tokenizer.fields(marks)
  own.eos, own.chat_template = 0, qwen_template
  ty.manual_seed(2)
  local model = models.Qwen2_5_VL { model_type = "qwen2_5_vl", image_token_id = 1, video_token_id = 2, eos_token_id = 0,
    text_config = { model_type = "qwen2_5_vl_text", vocab_size = marks.size, hidden_size = 16, intermediate_size = 32,
      num_hidden_layers = 1, num_attention_heads = 2, max_position_embeddings = 1024,
      rope_parameters = { rope_theta = 1e4, mrope_section = { 1, 1, 2 } } },
    vision_config = { depth = 1, hidden_size = 16, out_hidden_size = 16, num_heads = 2, intermediate_size = 20,
      patch_size = 4, window_size = 16, fullatt_block_indexes = { 0 } } }
  model:save(path)
  marks:save(path)
  local config = { image_processor_type = "Qwen2VLImageProcessor", patch_size = 4, min_pixels = 64, max_pixels = 1024,
    image_mean = ty.io.array { 0.5, 0.5, 0.5 }, image_std = ty.io.array { 0.5, 0.5, 0.5 } }
  ty.io.save_json(path .. "/preprocessor_config.json", config)
  local chat = vlm.load(path)
  local clip = ty.randint(0, 256, { 5, 3, 16, 24 }):to "u8"
  local function messages(video, fps, second)
    return { { role = "user", content = { { type = "video", video = video, fps = fps }, { type = "image",
      image = picture }, second or { type = "text", text = "what?" }, { type = "text", text = "what?" } } } }
  end
  local tokens, pictures, sizes, clips = chat:inputs(messages(clip, 4))
  check.equal(marks:decode(tokens:select(0, 0), { skip_special = false }), "<|im_start|>system\nYou are a helpful "
    .. "assistant.<|im_end|>\n<|im_start|>user\n<|vision_start|>" .. ("<|video_pad|>"):rep(18) .. "<|vision_end|>"
    .. "<|vision_start|><|image_pad|><|vision_end|>what?what?<|im_end|>\n<|im_start|>assistant\n")
  -- Three times of two frames, 2 x 3 features each; a picture of one.
  check.equal(clips.video_sizes:tolist(), { { 3, 4, 6 } })
  check.equal(clips.video_seconds:tolist(), { 0.5 })
  check.equal({ tokens:eq(2):to("i64"):sum():item(), tokens:eq(1):to("i64"):sum():item() }, { 18, 1 })
  -- A list of frames is the same clip.
  local frames = {}
  for i = 0, 4 do
    frames[i + 1] = i % 2 == 0 and clip[i] or path .. ("/%d.png"):format(i)
    if i % 2 == 1 then ty.io.save_image(frames[i + 1], clip[i]) end
  end
  local listed, _, _, others = chat:inputs(messages(frames, 4))
  check.equal({ listed:tolist(), others.videos:tolist() }, { tokens:tolist(), clips.videos:tolist() })
  -- What it says is what the model says to these.
  local how = { temperature = 0, pictures = pictures, sizes = sizes }
  for key, value in pairs(clips) do how[key] = value end
  local ids, said = chat.model:generate(tokens, 6, how):select(0, 0):tolist(), {}
  for i = tokens.shape[2] + 1, #ids do
    if ids[i] == 0 then break end
    said[#said + 1] = ids[i]
  end
  check.equal(chat:generate(messages(clip, 4), { max_tokens = 6 }), (marks:decode(said):gsub("^%s+", "")))
  -- A clip of a data set of Tycho, and two of them.
  local item = require("tycho.datasets").load("clips", { frames = 8, size = 32 }):get(0)
  local two, _, _, both = chat:inputs(messages(item.video, nil, { type = "video", video = clip, fps = 2 }))
  check.equal(both.video_sizes:tolist(), { { 4, 8, 8 }, { 3, 4, 6 } })
  check.equal(two:eq(2):to("i64"):sum():item(), 64 + 18)
  check.close(both.video_seconds:tolist(), { 2 / 24, 1 }, 1e-12)
  -- What cannot be.
  check.fails(function() chat:inputs(messages(nil)) end,
    "message 1: expected video = u8 [frames, channels, h, w] or a list of pictures, got nil")
  check.fails(function() chat:inputs(messages(picture:to "f32")) end, "clip 1: expected u8 [frames, channels, h, w]")
  check.fails(function() chat:inputs(messages {}) end, "clip 1: expected u8 [frames, channels, h, w] or a list")
  check.fails(function() chat:inputs(messages({ picture, clip[0] })) end,
    "clip 1, frame 2: expected 8 x 8 pixels as the first has, got 16 x 24")
  check.fails(function() chat:inputs(messages { clip[0], "nowhere.png" }) end,
    'clip 1, frame 2: cannot open "nowhere.png"')
  check.fails(function() chat:inputs(messages(clip, 0)) end, "clip 1: fps: expected a number > 0, got 0")
  check.fails(function() chat:inputs { { role = "user", content = "a <|video_pad|>?" } } end,
    "expected as many clips as video tokens in the text, got 0 and 1")
  check.fails(function() chat:inputs(messages(clip, 4, { type = "text", text = "<|image_pad|>" })) end,
    "expected as many pictures as image tokens in the text, got 1 and 2")
  check.fails(function() vlm.load(folder):inputs(messages(clip, 4)) end,
    "expected no clips, which a Llava does not see, got 1")
  config.image_mean = 3
  ty.io.save_json(path .. "/video_preprocessor_config.json", config)
  check.fails(function() vlm.load(path):inputs(messages(clip, 4)) end,
    "video_preprocessor_config.json: image_mean: expected a list of three numbers, got 3")
end)

os.execute(("rm -rf '%s'"):format(folder))
check.finish()
