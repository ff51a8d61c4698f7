---@meta
-- Declarations of ty.io, which is written in C: see core.lua.

---@class ty
local ty = {}

ty.io = {}

--- Reads a file by its first bytes or its ending: .safetensors, .gguf and .npz give a table of tensors (and metadata),
--- .npy and images a tensor, .csv a tensor and names, .json Lua values.
---@param path string
---@return any ...
function ty.io.load(path, ...) end

--- Writes by the ending: .safetensors, .gguf, .npz, .npy, .png, .webp, .json. Written beside and renamed.
---@param path string
---@param value any
function ty.io.save(path, value, ...) end

--- The tensors of a safetensors file by name, mapped and not copied unless mmap is false, and its metadata.
---@param path string
---@param options? {mmap?: boolean}
---@return table<string, Tensor>, table<string, string>
function ty.io.load_safetensors(path, options) end

--- A file of torch.save (1.6 or newer): tensors, and numbers and text as text. Names of nested dictionaries are joined
--- by dots. Nothing in the file is ever run; what is not data is an error.
---@param path string
---@param options? {mmap?: boolean}
---@return table<string, Tensor>, table<string, string>
function ty.io.load_torch(path, options) end

--- crc32: gives the file's, as ty.io.crc32() would, from the bytes on their way. places: gives where in the file the
--- bytes of each tensor lie, how many they are, and their sum. rate: bytes a second at most, where others want the disk
--- as well.
---@param path string
---@param tensors table<string, Tensor>
---@param metadata? table<string, string>
---@param options? {crc32?: boolean, places?: boolean, rate?: integer}
---@return any ...  crc32: integer; places: table<string, { at: integer, bytes: integer, crc32: integer }>
function ty.io.save_safetensors(path, tensors, metadata, options) end

--- A GGUF file (versions 2 and 3; ggml's docs/gguf.md), the tensors mapped, not copied: f32, f16, bf16, f64, i8 to i64,
--- q8_0, q4_0, q2_k, q3_k, q4_k, q6_k and mxfp4, sizes in our order (the reverse of ggml's). Asking for a tensor of
--- another format is an error that names it. Metadata values are Lua values, arrays lists; a u64 above 2^63 comes as a
--- float. The third result has the file's `version` and `alignment`, `types` (of metadata: "u32", of arrays "u32[]")
--- and `tensors`, a list of { name, format, shape, offset, bytes } in the order of the file.
---@param path string
---@param options? {mmap?: boolean}
---@return table<string, Tensor>, table<string, any>, table
function ty.io.load_gguf(path, options) end

--- Writes GGUF version 3. Metadata values without an entry in `types` are written as u32 (negative: i32, larger: i64),
--- f32, bool, string; lists of integers as i32 where all fit. The types that load_gguf gives write a file back as it
--- was.
---@param path string
---@param tensors table<string, Tensor>
---@param metadata? table<string, any>
---@param options? {alignment?: integer, types?: table<string, string>}
function ty.io.save_gguf(path, tensors, metadata, options) end

--- An ONNX file as a table: { graph, opset = { [""] = version }, ir_version, model_version, producer_name,
--- producer_version, domain, metadata }. A graph is { name, nodes, initializers, inputs, outputs }: nodes { op, name,
--- domain, inputs, outputs, attributes }, whose attributes are integers, floats, strings, tensors, graphs and lists;
--- initializers { name, tensor }; inputs and outputs { name, dtype, shape }, where sizes are numbers, names or false.
--- Weights in files beside are mapped. Of types that Tycho lacks u16 comes as i32, u32 and u64 as i64, four bits as
--- eight. To run it: hub.load. Needs a build with libprotobuf-c.
---@param path string
---@return table model
function ty.io.load_onnx(path) end

--- Writes a table as load_onnx makes them. Numbers among the attributes are written as what they are in Lua, integers
--- or floats. external: tensors of 1 KB and more go into the file path.data.
---@param path string
---@param model table
---@param options? {external?: boolean}
function ty.io.save_onnx(path, model, options) end

--- The tensors of a NumPy archive by name.
---@param path string
---@param options? {mmap?: boolean}
---@return table<string, Tensor>
function ty.io.load_npz(path, options) end

--- Writes tensors as a NumPy archive.
---@param path string
---@param tensors table<string, Tensor>
---@param options? {compress?: boolean}
function ty.io.save_npz(path, tensors, options) end

--- The tensor of a NumPy file, mapped and not copied unless mmap is false.
---@param path string
---@param options? {mmap?: boolean}
---@return Tensor
function ty.io.load_npy(path, options) end

--- Writes a tensor as a NumPy file.
---@param path string
---@param tensor Tensor
function ty.io.save_npy(path, tensor) end

--- A PNG, JPEG or WebP file as a u8 tensor [channels, height, width]; channels 0: as the file has them. The picture is
--- turned and mirrored as the Orientation of its Exif data says, but for exif = false. crop: a box { top, left,
--- height, width } in pixels of what comes, fractions too; size: { height, width } that the box, or the whole, is
--- resized to, as crop_resize does (bilinear). A JPEG file is decoded no larger than that takes, which is much faster.
--- WebP: of one picture only, where the build has libwebp.
---@param path string
---@param options? {channels?: integer, crop?: number[], size?: integer[], exif?: boolean}
---@return Tensor
function ty.io.load_image(path, options) end

--- Like load_image, from the bytes of a file.
---@param bytes string
---@param options? {channels?: integer, crop?: number[], size?: integer[], exif?: boolean}
---@return Tensor
function ty.io.decode_image(bytes, options) end

--- Channels, height and width that the bytes of a PNG, JPEG or WebP file claim, upright as load_image() gives it unless
--- exif = false; nothing is decoded.
---@param bytes string
---@param options? {exif?: boolean}
---@return integer channels
---@return integer height
---@return integer width
function ty.io.image_size(bytes, options) end

--- Writes a u8 tensor [channels, height, width]: WebP where the path ends in .webp, else PNG. level: 0 (fast) to 9
--- (small); quality: 0 to 100, of a WebP file that is not to be exact. text: strings that go into a PNG file beside the
--- pixels, by keys of 1 to 79 characters of ASCII ("parameters", say); png_text reads them.
---@param path string
---@param image Tensor
---@param options? {level?: integer, quality?: integer, text?: table<string, string>}
function ty.io.save_image(path, image, options) end

--- Like save_image; the bytes.
---@param image Tensor
---@param options? {level?: integer, text?: table<string, string>}
---@return string
function ty.io.encode_png(image, options) end

--- A WebP file's bytes of a u8 tensor [channels, height, width]; it has colours, gray or not. The same numbers come
--- back unless a quality is given. level: 0 (fast) to 9 (small).
---@param image Tensor
---@param options? {level?: integer, quality?: integer} quality: 0 to 100
---@return string
function ty.io.encode_webp(image, options) end

--- The sound of a FLAC file's bytes: f32 [channels, samples] from -1 to 1, samples a second, bits of a sample. from
--- and count: a part of it, found without decoding what stands before. max: how many numbers there may be (2^29).
---@param bytes string
---@param options? {from?: integer, count?: integer, max?: integer, name?: string} name: of the file, for errors
---@return Tensor sound
---@return integer rate
---@return integer bits
function ty.io.decode_flac(bytes, options) end

--- A FLAC file's bytes of i32 samples [samples, channels] that fit into the bits (16; 4 to 24). level: 0 (fast) to 8.
---@param samples Tensor
---@param rate integer
---@param options? {bits?: integer, level?: integer}
---@return string
function ty.io.encode_flac(samples, rate, options) end

--- The texts in the bytes of a PNG file, by their keys: ty.io.png_text(ty.io.read "a.png").
---@param bytes string
---@return table<string, string>
function ty.io.png_text(bytes) end

--- A file of bare numbers, mapped into memory.
---@param path string
---@param options? {dtype?: Dtype, shape?: integer[], offset?: integer}
---@return Tensor
function ty.io.map(path, options) end

--- A tensor from little-endian bytes in C order.
---@param bytes string
---@param dtype Dtype
---@param shape? integer[]
---@return Tensor
function ty.io.from_bytes(bytes, dtype, shape) end

--- The elements as little-endian bytes in C order.
---@param tensor Tensor
---@return string
function ty.io.to_bytes(tensor) end

--- A table of numbers as a tensor [rows, columns], and the names of the columns when the file has them.
---@param path string
---@param options? {header?: boolean|string, delimiter?: string, skip?: integer, missing?: string, dtype?: Dtype}
---@return Tensor, string[]?
function ty.io.load_csv(path, options) end

--- values: how many a text may have (4194304), since Lua's tables take far more memory than what they are read from.
---@param text string
---@param options? {values?: integer}
---@return any
function ty.io.json_decode(text, options) end

--- Keys in byte order.
---@param value any
---@param options? {indent?: integer}
---@return string
function ty.io.json_encode(value, options) end

--- Like json_decode, from a file; gzip is unpacked. max: how many bytes it may have then.
---@param path string
---@param options? {max?: integer, values?: integer}
---@return any
function ty.io.load_json(path, options) end

--- Writes a value as JSON, as json_encode gives it.
---@param path string
---@param value any
---@param options? {indent?: integer}
function ty.io.save_json(path, value, options) end

--- Marks a table as a JSON list, which matters when it is empty.
---@param list? table
---@return table
function ty.io.array(list) end

--- The text of a file; gzip is unpacked.
---@param path string
---@param options? {max?: integer} bytes
---@return string
function ty.io.read(path, options) end

--- The lines of a file one by one; gzip is unpacked.
---@param path string
---@return fun(): string?
function ty.io.lines(path) end

--- Writes a file beside the old one and renames it: a kill at any moment leaves one or the other.
---@param path string
---@param text string
function ty.io.write_atomic(path, text) end

--- What is at a path, or nil.
---@param path string
---@return {kind: "file"|"directory"|"other", size: integer, mtime: number}?
function ty.io.stat(path) end

--- Whether there is a file or a folder at a path.
---@param path string
---@return boolean
function ty.io.exists(path) end

--- The checksum of a file's bytes, or of a tensor's, as zlib's crc32.
---@param path string|Tensor
---@return integer
function ty.io.crc32(path) end

--- Names in a folder, in byte order.
---@param path? string
---@return string[]
function ty.io.listdir(path) end

--- Makes a folder with its parents.
---@param path string
function ty.io.mkdir(path) end

--- Removes a file or an empty folder.
---@param path string
function ty.io.remove(path) end

--- Makes a folder and in it a file of events for TensorBoard. writer:scalar(tag, value, step), writer:close().
---@param folder string
---@return table writer
---@return string path
function ty.io.event_writer(folder) end

return ty
